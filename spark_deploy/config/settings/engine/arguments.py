"""Arguments of the engine that one key of a profile decides, each declared here and nowhere else.

What is declared with an ``Option`` is told to the engine, refused among ``engine.options``, and
taken out of recipes of others by ``spark-deploy add``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from spark_deploy.config.documents.declare import Gib, needed, notes_of, setting


class Option(NamedTuple):
    """How the engine calls what a key decides."""

    name: str
    setting: str | None = None  # with which owners replace what the profile says


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one host serves."""

    max_context_tokens: int | None = setting(
        None,
        "Longest prompt plus answer; null for the model's native context.",
        minimum=64,
        note=Option("max-model-len", "engine.max_context_tokens"),
    )
    max_sequences: int = needed(
        "Requests computed at the same time.",
        minimum=1,
        maximum=1024,  # no host of one GPU gains above it, and the engine captures graphs up to it
        note=Option("max-num-seqs", "engine.max_sequences"),
    )
    max_batched_tokens: int = needed(
        "Tokens of one engine step; more speeds up prompts and needs memory.",
        minimum=1,
        note=Option("max-num-batched-tokens"),
    )
    memory_fraction: float = needed(
        "Share of memory.total_gib the engine may take in all.",
        exclusiveMinimum=0,
        maximum=0.95,
        note=Option("gpu-memory-utilization", "engine.memory_fraction"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """Type and size of the KV cache."""

    size_bytes: Gib | None = setting(
        None,
        "Pins the cache to this size in GiB; null derives it from limits.memory_fraction.",
        key="size_gib",
        exclusiveMinimum=0,
        note=Option("kv-cache-memory-bytes", "engine.kv_cache_gib"),
    )
    dtype: str = setting(
        "auto",
        "auto (16 bit), fp8 or a turboquant_* preset; of others the plan cannot count the bytes.",
        enum=[
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
        ],
        note=Option("kv-cache-dtype"),
    )


_DECLARED: tuple[tuple[str, str, Option], ...] = tuple(
    (section, field, option)
    for section, cls in (("limits", Limits), ("kv_cache", KvCache))
    for field, option in notes_of(cls).items()
)
# Each option to the key of a profile that decides it, and to what to do instead of naming it.
DECIDING = {option.name: (section, field) for section, field, option in _DECLARED}
INSTEAD = {
    option.name: f"set {option.setting or f'{section}.{field} in a profile of your own'}"
    for section, field, option in _DECLARED
}


def told(section: Limits | KvCache) -> dict[str, Any]:
    """Return the engine's options with the values of a section of the profile."""
    notes = notes_of(type(section))
    return {option.name: getattr(section, field) for field, option in notes.items()}
