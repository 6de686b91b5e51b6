"""Engine settings that replace values of the profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from spark_deploy.config.documents import Gib, Violation, form
from spark_deploy.config.settings.engine_options import environment_problems, option_problems

ENVIRONMENT_NAMES = form(
    "^[A-Z_][A-Z0-9_]*$", "the variable's name in capitals, digits and _", "NCCL_DEBUG"
)
# vLLM's names, accepted for settings of the engine.
VLLM_NAMES = {
    "max_model_len": "max_context_tokens",
    "max_num_seqs": "max_sequences",
    "gpu_memory_utilization": "memory_fraction",
    "num_speculative_tokens": "drafts",
}
OPTION_NAMES = form(
    "^[a-z][a-z0-9_-]*$", "the option without its dashes and its value", "max-log-len"
)


def _accept_vllm_names(schema: dict[str, Any]) -> None:
    properties = schema["properties"]
    for alias, name in VLLM_NAMES.items():
        if name in properties:
            text = f"vLLM's name for `{name}`."
            properties[alias] = {**properties[name], "description": text}


_CONFIG = ConfigDict(extra="forbid", json_schema_extra=_accept_vllm_names)


def broken_words(options: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Violation]:
    """Yield refused options and variables."""
    for option, message, fix in option_problems(options):
        yield Violation(("options", option), message, fix)
    for name, message, fix in environment_problems(environment):
        yield Violation(("environment", name), message, fix)


@dataclass(frozen=True, slots=True, config=_CONFIG)
class ServiceEngineSettings:
    """Engine settings of one service; null: the profile's value."""

    max_context_tokens: int | None = Field(default=None, ge=64)
    """Longest prompt plus answer, in tokens."""
    max_sequences: int | None = Field(default=None, ge=1, le=1024)
    """Requests computed at the same time."""
    kv_cache_gib: Gib | None = Field(default=None, gt=0)
    """Pins the KV cache to this size (GiB) instead of deriving it from the memory fraction."""
    drafts: int | None = Field(default=None, ge=0, le=3, examples=[1])
    """Draft tokens of each step by the model's MTP layer; 0: none. The check then requires that
    half of them are accepted."""
    head: Literal["keep", "int8-g128", "int8-triton"] | None = None
    """LM head, as `head` of a profile; may need a new checkpoint."""
    chat_template: str | None = Field(default=None, min_length=1, examples=["templates/chat.jinja"])
    """Local file with a Jinja chat template, relative to the inventory's folder. Its text is part
    of the release: a changed file is a new release."""
    vision: bool | None = None
    """true keeps the vision tower (0.8 GiB for Qwen3.5), false serves text only."""
    options: dict[str, Any] = Field(
        default_factory=dict,
        examples=[{"seed": 1}],
        json_schema_extra={"propertyNames": OPTION_NAMES},
    )
    """More options of `vllm serve`: name without dashes (words joined by - or _) to value. true
    gives a bare flag, null drops an option of the profile."""
    environment: dict[str, str] = Field(
        default_factory=dict,
        examples=[{"VLLM_LOG_STATS_INTERVAL": "30"}],
        json_schema_extra={"propertyNames": ENVIRONMENT_NAMES},
    )
    """More environment variables of the engine. Never secrets: they are visible on the host."""

    def broken(self) -> Iterator[Violation]:
        return broken_words(self.options, self.environment)


@dataclass(frozen=True, slots=True, config=_CONFIG)
class EngineSettings(ServiceEngineSettings):
    """Engine settings; null: the profile's value."""

    memory_fraction: float | None = Field(default=None, gt=0, le=0.95)
    """Share of memory.total_gib the engine may take in all; above 0.82 hosts were reported to
    thrash or freeze."""
