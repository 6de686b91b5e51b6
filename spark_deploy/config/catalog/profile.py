"""A profile: one file of ``catalog/profiles``, declared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass
from pydantic.json_schema import SkipJsonSchema
from spark_contract.orders import Scheme

from spark_deploy.config.catalog.companions import Speculation
from spark_deploy.config.documents import CLOSED, UNIQUE, Text, Violation, form
from spark_deploy.config.settings.engine import ENVIRONMENT_NAMES, OPTION_NAMES, broken_words
from spark_deploy.config.settings.engine_arguments import KvCache, Limits
from spark_deploy.config.settings.service import CatalogName

# What a model's changes may depend on, in the words of the guard rails.
TRAITS: dict[str, Callable[[Profile], Any]] = {
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
    """A number someone else published."""

    what: str
    """What was measured, and where."""
    value: str
    """The figure with its unit."""
    source: str
    """Who published it, and the stack that it was measured on."""
    model: CatalogName | None = None
    """With tokens_per_s: the model of catalog/models that it is about."""
    tokens_per_s: float | None = Field(default=None, gt=0)
    """The same figure as a number; the computed speed is held against it."""
    requests: int = Field(default=1, ge=1)
    """With tokens_per_s: requests at once, for all of them."""
    fitted: bool = False
    """Whether numbers of the computed speed were fitted on it."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class ResultRow:
    """A row of one of this project's result files."""

    what: str
    """What was shown, with its limits."""
    result: str = Field(
        json_schema_extra=form(r"^[a-z0-9-]+\.json$", "the file's name alone", "recall.json")
    )
    """File of proofs/results/gpu."""
    claim: str
    """The row's claim in that file, word for word."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class ProfileCheck:
    """What the proof demands of this profile."""

    acceptance_floor: float | None = Field(default=None, ge=0, le=1)
    """Smallest share of accepted draft tokens; null without speculation."""
    prefix_reuse: bool = False
    """Hold a growing conversation and demand that the engine's counter of prefix hits rises."""
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
    """Metric name to a smallest value, or to labels that one sample must carry."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Profile:
    """One way of serving: a file of catalog/profiles, with the overrides of a model merged in."""

    name: SkipJsonSchema[str]  # of the file
    based_on: CatalogName | SkipJsonSchema[None] = None
    """Another profile whose keys this file changes, but for what is published and proven of it; one
    step only."""
    summary: str = Field(max_length=100)
    """What this profile is, in one line."""
    choose_when: str = Field(max_length=160)
    """Who should take it, in one line."""
    published: tuple[Figure, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """Figures of others, each with its source; never our own measurements."""
    stage: PositiveInt | SkipJsonSchema[None] = None
    """Its place among profiles that differ in one thing each: `bench --ladder` serves and measures
    them in this order."""
    proven: tuple[ResultRow, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """What a result file of this project shows of this profile, and on what; nothing else is
    claimed."""
    shared_experts: Scheme = Field(
        json_schema_extra={"enum": ["fp8-donor", "fp8-self", "int8-g128", "keep"]}
    )
    """fp8-donor: FP8 from the donor; fp8-self: own FP8 of the base's weights; int8-g128: INT8 in
    groups of 128, needs no plugin; keep: 16 bit as in the base."""
    head: Literal["keep", "int8-g128", "int8-triton"] = "keep"
    """keep: as in the base; int8-g128: baked as INT8 with groups of 128; int8-triton: as in the
    base, made INT8 by our plugin while it loads and computed by the fastest of our kernel, Marlin
    and 16 bit, measured once on the host."""
    layout: Literal["overlay", "full"] = "overlay"
    """overlay: hard links to the base and one small shard; full: rewritten shards."""
    plugin: bool
    """true: the image gets our plugin layer; false: the image is used unchanged."""
    # The model's image decides it; the file of a profile cannot.
    engine_mode: SkipJsonSchema[str] = "native"
    load_format: str = "fastsafetensors"
    """How the engine reads the shards."""
    kv_cache: KvCache = Field(default_factory=KvCache)
    speculation: Speculation | None = None
    """Draft tokens that the model only has to confirm; null for none."""
    limits: Limits = Field()
    prefix_caching: bool = False
    """Keep the KV cache of shared prompt beginnings."""
    vision: bool = False
    """Keep the vision tower."""
    options: dict[str, Any] = Field(
        default_factory=dict, json_schema_extra={"propertyNames": OPTION_NAMES}
    )
    """Further options of `vllm serve`: name without dashes to value; true is a bare flag, false its
    --no- form, a mapping becomes JSON, null drops the option."""
    environment: dict[str, str] = Field(
        default_factory=dict, json_schema_extra={"propertyNames": ENVIRONMENT_NAMES}
    )
    """Further environment of the engine."""
    check: ProfileCheck = Field(default_factory=ProfileCheck)

    @property
    def traits(self) -> dict[str, Any]:
        """Return the value of each of ``TRAITS``."""
        return {name: of(self) for name, of in TRAITS.items()}

    @property
    def builds_checkpoint(self) -> bool:
        """Whether a tree of our own is served instead of the base as it is."""
        return self.shared_experts != "keep" or self.checkpoint_head != "keep"

    @property
    def checkpoint_head(self) -> Literal["keep", "int8-g128"]:
        """The head in the tree: our own kernel quantises a 16-bit one while it is loaded."""
        return "keep" if self.head == "int8-triton" else self.head

    @property
    def tree_needs_plugin(self) -> bool:
        """Whether an engine without our plugin refuses the tree this profile serves."""
        overlay = self.builds_checkpoint and self.layout == "overlay"
        return self.shared_experts.startswith("fp8") or overlay

    def broken(self) -> Iterator[Violation]:
        """Yield options and variables that must not be given here, and drafts of no form."""
        for one in self.speculation.broken() if self.speculation else ():
            yield one._replace(key=("speculation", *one.key))
        yield from broken_words(self.options, self.environment)
