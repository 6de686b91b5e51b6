"""Settings of the engine: what an owner may say instead of the profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spark_deploy.config.documents.declare import Gib, form, instead_of, setting
from spark_deploy.config.settings.engine.arguments import KvCache, Limits
from spark_deploy.config.settings.engine.options import environment_problems, option_problems
from spark_deploy.config.settings.rules import Broken

ENVIRONMENT_NAMES = form(
    "^[A-Z_][A-Z0-9_]*$", "the variable's name in capitals, digits and _", "NCCL_DEBUG"
)
OPTION_NAMES = form(
    "^[a-z][a-z0-9_-]*$", "the option without its dashes and its value", "max-log-len"
)


def broken_words(options: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Broken]:
    """Yield options and variables that nobody may give the engine."""
    for option, what, fix in option_problems(options):
        yield Broken(("options", option), what, fix)
    for name, what, fix in environment_problems(environment):
        yield Broken(("environment", name), what, fix)


@dataclass(frozen=True, slots=True)
class ServiceEngineSettings:
    """Values of the profile replaced for one service; null keeps the profile's."""

    max_context_tokens: int | None = instead_of(
        Limits, "max_context_tokens", "Longest prompt plus answer, in tokens."
    )
    max_sequences: int | None = instead_of(Limits, "max_sequences")
    kv_cache_bytes: Gib | None = instead_of(
        KvCache,
        "size_bytes",
        "Pins the KV cache to this size (GiB) instead of deriving it from the memory fraction.",
        key="kv_cache_gib",
    )
    drafts: int | None = setting(
        None,
        "Draft tokens of each step, by the model's own MTP layer; 0 switches them off. The proof "
        "then demands that half of them are accepted.",
        minimum=0,
        maximum=3,
        examples=[1],
    )
    head: Literal["keep", "int8-g128", "int8-triton"] | None = setting(
        None,
        "The LM head, in the words of a profile's `head`; another tree is built where it needs "
        "one.",
    )
    chat_template: str | None = setting(
        None,
        "File of this machine with a Jinja template that replaces the tree's own; a relative path "
        "counts from the inventory's folder. Its text is part of the release: a changed file "
        "changes the host over, with proof and way back.",
        minLength=1,
        examples=["templates/chat.jinja"],
    )
    vision: bool | None = setting(
        None, "true keeps the vision tower (0.8 GiB for Qwen3.5), false serves text only."
    )
    options: dict[str, Any] = setting(
        dict,
        "More options of `vllm serve`: name without dashes (words joined by - or _) to value. true "
        "gives a bare flag, null drops an option of the profile.",
        propertyNames=OPTION_NAMES,
        examples=[{"seed": 1}],
    )
    environment: dict[str, str] = setting(
        dict,
        "More environment variables of the engine. Never secrets: they are visible on the host.",
        propertyNames=ENVIRONMENT_NAMES,
        examples=[{"VLLM_LOG_STATS_INTERVAL": "30"}],
    )

    def broken(self) -> Iterator[Broken]:
        """Yield options and variables that must not be given here."""
        return broken_words(self.options, self.environment)


@dataclass(frozen=True, slots=True)
class EngineSettings(ServiceEngineSettings):
    """Values of the profile replaced for a group or host; null keeps the profile's."""

    memory_fraction: float | None = instead_of(
        Limits,
        "memory_fraction",
        "Share of memory.total_gib the engine may take in all; above 0.82 hosts were reported to "
        "thrash or freeze.",
    )
