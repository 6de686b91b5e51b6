"""Profiles: files of ``catalog/profiles``."""

import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass
from pydantic.json_schema import SkipJsonSchema
from spark_contract.builder_api import Scheme

from spark_deploy.config.catalog.architecture import RepoMetadata
from spark_deploy.config.documents import CLOSED, UNIQUE, Text, Violation, text_schema
from spark_deploy.config.settings.engine import (
    ENVIRONMENT_NAMES,
    OPTION_NAMES,
    DraftSchedule,
    DraftVocabulary,
    KvCache,
    Limits,
    check_schedule,
    engine_violations,
)
from spark_deploy.config.settings.service import CatalogName

HUB_REPOSITORY = text_schema(
    "^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$",
    "Hub repository as ORG/NAME, not a URL", "Qwen/Qwen3-0.6B",
)  # fmt: skip
HubRepository = Annotated[str, Field(json_schema_extra=HUB_REPOSITORY)]
# Methods whose drafter is in a separate repository.
METHODS_WITH_REPOSITORY = ("dflash", "eagle3", "draft_model")
_MAX_MTP_TOKENS = 8


def is_repository(name: str) -> bool:
    """Return whether a hub accepts this repository name."""
    return len(name) < 200 and bool(re.fullmatch(str(HUB_REPOSITORY["pattern"]), name))


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Speculation:
    """Draft tokens that the model verifies."""

    method: Literal["mtp", "dflash", "eagle3", "ngram", "draft_model"]
    """How drafts are made. mtp: by the model's own layers, which may be in a separate
    repository; dflash and eagle3: by a drafter made for this model; draft_model: by a smaller model
    with the same vocabulary; ngram: by tokens that follow the same words earlier in the request,
    without weights."""
    tokens: int = Field(ge=1, le=16, description="Draft tokens in each step.")
    repository: HubRepository | None = None
    """The drafter's repository on the model hub; required by dflash, eagle3 and draft_model."""
    revision: str = Field(default="main", description="Branch, tag or commit of that repository.")
    draft_sample_method: Literal["greedy", "probabilistic"] | None = None
    """vLLM's option: greedy (its default) drafts the likeliest token; probabilistic samples from
    the drafter's distribution, so that more drafts are accepted at temperatures above 0."""
    rejection_sample_method: Literal["standard", "block"] | None = None
    """vLLM's option: standard (its default) verifies the drafts of a step one at a time; block
    verifies them jointly. Neither changes the distribution of the answers."""
    num_speculative_tokens_per_batch_size: DraftSchedule | None = None
    """vLLM's option: [first, last, drafts] for a number of running requests; `tokens` is the limit.
    Use fewer drafts with many requests, because each draft reads more experts."""
    draft_vocabulary_tokens: DraftVocabulary | None = None
    """With head: int8-triton and on one host, number of frequent tokens from which drafts are
    chosen; the drafter then reads only their rows of the LM head. 0 or null: all."""
    # The text itself, filled from the settings.
    draft_vocabulary_text: SkipJsonSchema[str | None] = None
    longest_match: int | None = Field(default=None, ge=1, le=64)
    """With ngram: maximum tokens to match."""
    shortest_match: int | None = Field(default=None, ge=1, le=64)
    """With ngram: minimum tokens to match."""
    # Filled from the lock.
    metadata: SkipJsonSchema[RepoMetadata | None] = None

    @property
    def uses_model_layers(self) -> bool:
        return self.method == "mtp" and self.repository is None

    def draft_tokens(self, requests: int) -> int:
        """Return the number of draft tokens while ``requests`` are running."""
        drafts = self.tokens
        for min_requests, _, scheduled in self.num_speculative_tokens_per_batch_size or ():
            if min_requests <= requests:
                drafts = min(self.tokens, scheduled)
        return drafts

    def violations(self) -> Iterator[Violation]:
        yield from check_schedule(self.num_speculative_tokens_per_batch_size)
        if self.method in METHODS_WITH_REPOSITORY and self.repository is None:
            message = (
                f"{self.method} needs a repository, because the model does not contain a drafter"
            )
            yield Violation(("repository",), message, "set it to the drafter's repository")
        if self.method == "ngram" and self.repository is not None:
            message = "ngram drafts need no weights, so they have no repository"
            yield Violation(
                ("repository",), message, "remove it, or choose another drafting method"
            )
        if self.draft_vocabulary_tokens and not self.uses_model_layers:
            message = "this setting applies only to drafts of the model's own MTP layer"
            yield Violation(("draft_vocabulary_tokens",), message, "remove it")
        if self.method == "mtp" and self.tokens > _MAX_MTP_TOKENS:
            message = f"{self.tokens} draft tokens are too many for an MTP layer"
            yield Violation(("tokens",), message, f"draft {_MAX_MTP_TOKENS} or fewer")
        for key in ("longest_match", "shortest_match"):
            if self.method != "ngram" and getattr(self, key) is not None:
                message = f"this setting applies only to ngram, not to {self.method}"
                yield Violation((key,), message, "remove it")
        longest_match = self.longest_match or 64
        if (self.shortest_match or 0) > longest_match:
            message = f"{self.shortest_match} is above longest_match, which is {longest_match}"
            yield Violation(("shortest_match",), message, f"set it to {longest_match} or less")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Adapter:
    """A LoRA adapter, served under a separate name."""

    repository: HubRepository = Field(description="Repository of the model hub.")
    revision: str = "main"
    """Branch, tag or commit to lock."""
    rank: int = Field(ge=1, le=512, description="`r` of its adapter_config.json.")
    # Filled from the lock.
    metadata: SkipJsonSchema[RepoMetadata | None] = None


# Traits for conditions of model changes, named like the facts of guard rails.
TRAITS: dict[str, Callable[["Profile"], Any]] = {
    "kv_cache": lambda profile: profile.kv_cache.dtype,
    "speculation_tokens": lambda profile: profile.speculation.tokens if profile.speculation else 0,
    "prefix_caching": lambda profile: profile.prefix_caching,
    "plugin": lambda profile: profile.plugin,
    "shared_experts": lambda profile: profile.shared_experts,
    "head": lambda profile: profile.head,
    "vision": lambda profile: profile.vision,
}


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Figure:
    """A published number."""

    what: str = Field(description="Measurement and setup.")
    value: str = Field(description="Figure with unit.")
    source: str = Field(description="Publisher, and the software stack that was measured.")
    model: CatalogName | None = None
    """With tokens_per_s: the measured model of catalog/models."""
    tokens_per_s: float | None = Field(default=None, gt=0)
    """The same figure as a number, compared with the computed speed."""
    requests: int = Field(default=1, ge=1)
    """With tokens_per_s: concurrent requests; the speed is their total."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class ResultRow:
    """A row in a result file of this project."""

    what: str = Field(description="Claim with its limits.")
    result: str = Field(
        json_schema_extra=text_schema(r"^[a-z0-9-]+\.json$", "the name of the file", "recall.json")
    )
    """File of proofs/results/gpu."""
    claim: str = Field(description="The row's claim in that file, word for word.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class ProfileCheck:
    """Requirements of the check."""

    acceptance_floor: float | None = Field(default=None, ge=0, le=1)
    """Minimum share of accepted draft tokens; null without speculation."""
    prefix_reuse: bool = False
    """Require prefix-cache hits in a growing conversation."""
    log_required: tuple[Text, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """Regular expressions that must each match a line of the engine's log."""
    log_forbidden: tuple[Text, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """Regular expressions that must match no line."""
    metrics_required: dict[str, Any] = Field(
        default_factory=dict,
        json_schema_extra={
            "additionalProperties": {
                "anyOf": [
                    {"type": "number"},
                    {"type": "object", "additionalProperties": {"type": "string"}},
                ]
            }
        },
    )
    """Metric names, each with a minimum or with required labels."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Profile:
    """A file of catalog/profiles, merged with the changes for a model."""

    name: SkipJsonSchema[str]  # of the file
    based_on: CatalogName | SkipJsonSchema[None] = None
    """Profile that this file extends, without its published and proven rows. That profile must not
    extend another."""
    summary: str = Field(max_length=100, description="One line about the profile.")
    choose_when: str = Field(max_length=160, description="One line: when to choose it.")
    published: tuple[Figure, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """Published figures with sources; never our measurements."""
    stage: PositiveInt | SkipJsonSchema[None] = None
    """Position in `bench --ladder`, which measures profiles that differ in a single feature."""
    only_compared: bool = False
    """Exists only for comparison with other profiles; `models` and `init` do not suggest it."""
    proven: tuple[ResultRow, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """Rows of result files about this profile."""
    shared_experts: Scheme = Field(
        json_schema_extra={"enum": ["fp8-donor", "fp8-self", "int8-g128", "keep"]}
    )
    """fp8-donor: FP8 from the FP8 source; fp8-self: FP8 made from the base's weights; int8-g128:
    INT8 in groups of 128, needs no plugin; keep: 16 bit as in the base."""
    head: Literal["keep", "int8-g128", "int8-triton"] = "keep"
    """keep: as in the base; int8-g128: stored as INT8 in groups of 128; int8-triton: stored as in
    the base; our plugin quantizes the head at load, and uses the fastest of our kernel, Marlin and
    16 bit, measured once on the host."""
    drafter: Literal["keep", "int4-g128"] = "keep"
    """keep: MTP layer as in the base; int4-g128: its 16-bit attention and routed experts rounded to
    INT4 in groups of 128."""
    ngram_table: Literal["device", "pinned", "file"] | None = None
    """Where a model's n-gram table is kept; null for models without a table. device: split over the
    hosts like other weights; pinned: pinned host memory, on a Spark the same memory as device;
    file: on disk, read row by row by our plugin."""
    ngram_format: Literal["keep", "e2m1", "e4m3"] = "keep"
    """keep: n-gram table as in the base; e2m1 (4 bits) and e4m3 (8 bits): rewritten by the builder
    as a file with checksums, for ngram_table: file."""
    layout: Literal["overlay", "full"] = "overlay"
    """overlay: hard links to the base and a small shard; full: rewritten shards."""
    plugin: bool
    """true: the image gets our plugin layer; false: the image is used unchanged."""
    # The model's image decides it; the file of a profile cannot.
    engine_mode: SkipJsonSchema[str] = "native"
    load_format: str = "fastsafetensors"
    """How the engine reads the shards."""
    kv_cache: KvCache = Field(default_factory=KvCache)
    speculation: Speculation | None = None
    """Draft tokens that the model verifies; null for none."""
    limits: Limits = Field()
    prefix_caching: bool = False
    """Keep the KV cache of shared prompt prefixes."""
    vision: bool = Field(default=False, description="Keep the vision tower.")
    template_fixes: bool = False
    """Use the model's `fixed_template`, if it has one, instead of the checkpoint's template."""
    options: dict[str, Any] = Field(
        default_factory=dict, json_schema_extra={"propertyNames": OPTION_NAMES}
    )
    """More options of `vllm serve`: name without dashes to value; true is a bare flag, false the
    --no- form, a mapping becomes JSON, null drops the option."""
    environment: dict[str, str] = Field(
        default_factory=dict, json_schema_extra={"propertyNames": ENVIRONMENT_NAMES}
    )
    """More environment variables of the engine."""
    check: ProfileCheck = Field(default_factory=ProfileCheck)

    @property
    def traits(self) -> dict[str, Any]:
        return {name: read_trait(self) for name, read_trait in TRAITS.items()}

    @property
    def builds_checkpoint(self) -> bool:
        """Whether the profile serves a built checkpoint instead of the base."""
        return self._replaces_weights or self.drafter != "keep" or self.ngram_format != "keep"

    @property
    def _replaces_weights(self) -> bool:
        return self.shared_experts != "keep" or self.checkpoint_head != "keep"

    @property
    def checkpoint_head(self) -> Literal["keep", "int8-g128"]:
        """Format of the head in the checkpoint; int8-triton quantizes it only while loading."""
        return "keep" if self.head == "int8-triton" else self.head

    @property
    def checkpoint_needs_plugin(self) -> bool:
        """Whether stock vLLM cannot load the checkpoint of this profile."""
        has_overlay = self._replaces_weights and self.layout == "overlay"
        return self.shared_experts.startswith("fp8") or has_overlay

    def violations(self) -> Iterator[Violation]:
        for violation in self.speculation.violations() if self.speculation else ():
            yield violation._replace(key=("speculation", *violation.key))
        yield from engine_violations(self.options, self.environment)
