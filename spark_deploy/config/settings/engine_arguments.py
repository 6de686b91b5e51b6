"""Keys of a profile that decide an option of the engine.

Such an option is passed to the engine, refused among ``engine.options``, and taken from other
people's recipes by ``spark-deploy add``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from spark_deploy.config.documents import CLOSED, GIB, Gib


class Option(NamedTuple):
    name: str
    setting: str | None = None  # replaces the profile's value


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Limits:
    """What one host serves."""

    max_context_tokens: int | None = Field(default=None, ge=64)
    """Longest prompt plus answer; null for the model's native context."""
    max_sequences: int = Field(ge=1, le=1024)
    """Requests computed at the same time."""
    max_batched_tokens: int = Field(ge=1)
    """Tokens of one engine step; more speeds up prompts and needs memory."""
    memory_fraction: float = Field(gt=0, le=0.95)
    """Share of memory.total_gib the engine may take in all."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class KvCache:
    """Type and size of the KV cache."""

    size_gib: Gib | None = Field(default=None, gt=0)
    """Pins the cache to this size in GiB; null derives it from limits.memory_fraction."""
    dtype: str = Field(
        default="auto",
        json_schema_extra={
            "enum": [
                "auto",
                "bfloat16",
                "float16",
                "fp8",
                "fp8_e4m3",
                "fp8_e5m2",
                "turboquant_k8v4",
                "turboquant_4bit_nc",
                "turboquant_k3v4_nc",
                "turboquant_3bit_nc",
            ]
        },
    )
    """auto (16 bit), fp8 or a turboquant_* preset; of others the plan cannot count the bytes."""

    @property
    def size_bytes(self) -> int | None:
        return None if self.size_gib is None else round(self.size_gib * GIB)


# What each key of a profile is called by the engine, and the setting that replaces it.
_OPTIONS = {
    ("limits", "max_context_tokens"): Option("max-model-len", "engine.max_context_tokens"),
    ("limits", "max_sequences"): Option("max-num-seqs", "engine.max_sequences"),
    ("limits", "max_batched_tokens"): Option("max-num-batched-tokens"),
    ("limits", "memory_fraction"): Option("gpu-memory-utilization", "engine.memory_fraction"),
    ("kv_cache", "size_gib"): Option("kv-cache-memory-bytes", "engine.kv_cache_gib"),
    ("kv_cache", "dtype"): Option("kv-cache-dtype"),
}
DECIDING = {option.name: key for key, option in _OPTIONS.items()}
INSTEAD = {
    option.name: f"set {option.setting or f'{section}.{field} in a profile of your own'}"
    for (section, field), option in _OPTIONS.items()
}


def option_values(limits: Limits, kv_cache: KvCache) -> dict[str, Any]:
    """Return the engine's options with the values of a profile."""
    sections = {"limits": limits, "kv_cache": kv_cache}
    values = {
        option.name: getattr(sections[section], field)
        for (section, field), option in _OPTIONS.items()
    }
    return {**values, "kv-cache-memory-bytes": kv_cache.size_bytes}
