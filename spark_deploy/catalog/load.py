"""Models and profiles of ``catalog/`` as frozen data, and the guard rails between them."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_deploy.catalog.tensor_sets import check_tensors
from spark_deploy.checkout import CHECKOUT, catalog_names
from spark_deploy.documents.schema_check import load_schema, problems_of
from spark_deploy.documents.yamlfile import read_mapping
from spark_deploy.errors import CatalogError, Problem
from spark_deploy.settings.engine_options import option_problems
from spark_deploy.settings.load import build, merge


@dataclass(frozen=True, slots=True)
class Sources:
    """Repositories of a model; the lock adds the commits."""

    base: str
    donor: str | None
    hybrid: str | None
    revision: str
    repeats_names: bool


@dataclass(frozen=True, slots=True)
class Architecture:
    """Numbers of ``config.json`` that sizes are computed from."""

    layers: int
    full_attention_every: int
    hidden: int
    vocabulary: int
    experts: int
    experts_per_token: int
    expert_width: int
    shared_expert_width: int
    attention_heads: int
    kv_heads: int
    head_width: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_head_width: int
    gdn_kernel: int
    mtp_layers: int
    mtp_scheme: str
    vision_bytes: int
    max_context_tokens: int

    @property
    def attention_layers(self) -> int:
        """Layers with full attention."""
        return self.layers // self.full_attention_every

    @property
    def gdn_layers(self) -> int:
        """Layers with a gated delta net."""
        return self.layers - self.attention_layers


@dataclass(frozen=True, slots=True)
class DonorShape:
    """What the donor holds for some swapped modules."""

    modules: str
    weight: tuple[int, ...]
    scale: tuple[int, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Counts:
    """How many names each set has, by somebody else's count or by arithmetic."""

    base: int
    mtp: int
    swap: int
    donor_unmatched: int
    source: str


@dataclass(frozen=True, slots=True)
class Tensors:
    """Exact sets of names, as patterns, and what is known of them otherwise."""

    swap: tuple[str, ...]
    block_shape: tuple[int, ...]
    base: tuple[str, ...]
    mtp: tuple[str, ...]
    donor_unmatched: tuple[str, ...]
    donor_shapes: tuple[DonorShape, ...]
    counts: Counts | None


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names of the engine's parsers."""

    reasoning: str | None
    tool_call: str | None


@dataclass(frozen=True, slots=True)
class ModelImage:
    """Which engine image serves the model."""

    role: str
    plugin: bool


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What the engine needs beside weights and KV cache."""

    runtime_bytes: int
    weights_factor: float


@dataclass(frozen=True, slots=True)
class Question:
    """One question whose answer can be checked."""

    prompt: str
    expect: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """What the proof asks."""

    questions: tuple[Question, ...]
    copy: tuple[str, ...]
    tool_call: bool
    reasoning: bool
    conversation: bool
    repeat: bool


@dataclass(frozen=True, slots=True)
class Model:
    """One file of ``catalog/models``."""

    name: str
    summary: str
    choose_when: str
    sources: Sources
    architecture: Architecture
    tensors: Tensors
    parsers: Parsers
    image: ModelImage
    memory: ModelMemory
    check: ModelCheck
    profile_overrides: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number someone else published."""

    what: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A row of one of this project's result files."""

    what: str
    result: str
    claim: str


@dataclass(frozen=True, slots=True)
class KvCache:
    """Type and size of the KV cache."""

    dtype: str
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class Speculation:
    """Draft tokens by the model's own MTP layer."""

    method: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What one host serves."""

    max_context_tokens: int | None
    max_sequences: int
    max_batched_tokens: int
    memory_fraction: float


@dataclass(frozen=True, slots=True)
class ProfileCheck:
    """What the proof demands of a profile."""

    acceptance_floor: float | None
    prefix_reuse: bool
    log_required: tuple[str, ...]
    log_forbidden: tuple[str, ...]
    metrics_required: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Profile:
    """One file of ``catalog/profiles``, with the overrides of a model merged in."""

    name: str
    summary: str
    choose_when: str
    published: tuple[Figure, ...]
    proven: tuple[ResultRow, ...]
    shared_experts: str
    head: str
    layout: str
    plugin: bool
    engine_mode: str  # native | portable; only a model's profile_overrides can set it
    load_format: str
    kv_cache: KvCache
    speculation: Speculation | None
    limits: Limits
    prefix_caching: bool
    vision: bool
    options: dict[str, Any]
    environment: dict[str, str]
    check: ProfileCheck

    @property
    def builds_checkpoint(self) -> bool:
        """Whether a tree of our own is served instead of the base as it is."""
        return self.shared_experts != "keep" or self.checkpoint_head != "keep"

    @property
    def checkpoint_head(self) -> str:
        """The head in the tree: our own kernel quantises a 16-bit one while it is loaded."""
        return "keep" if self.head == "int8-triton" else self.head

    @property
    def tree_needs_plugin(self) -> bool:
        """Whether an engine without our plugin refuses the tree this profile serves."""
        overlay = self.builds_checkpoint and self.layout == "overlay"
        return self.shared_experts.startswith("fp8") or overlay


@dataclass(frozen=True, slots=True)
class GuardRail:
    """A combination known to end badly; ``applies`` is fact -> comparison."""

    rule: str
    applies: dict[str, dict[str, Any]]
    effect: str
    reason: str
    fix: str
    source: str


@functools.cache
def load_model(name: str, *, checkout: Path = CHECKOUT) -> Model:
    """Return the model of ``catalog/models/<name>.yml``."""
    data = _model_data(name, checkout)
    check_tensors(f"catalog/models/{name}.yml", data["tensors"], donor=data["sources"]["donor"])
    model: Model = build(Model, {**data, "name": name})
    return model


@functools.cache
def load_profile(name: str, model_name: str, *, checkout: Path = CHECKOUT) -> Profile:
    """Return a profile as one model wants it: the file with the model's overrides merged in."""
    shown = f"catalog/profiles/{name}.yml"
    data = _read("profiles", name, checkout)
    schema = load_schema("profile", checkout=checkout)
    _refuse(data, schema, shown)
    change = load_model(model_name, checkout=checkout).profile_overrides.get(name, {})
    if change:
        shown = f"catalog/models/{model_name}.yml profile_overrides.{name}"
        mode = {"title": "Engine mode", "description": "native or portable.", "default": "native"}
        mode["enum"] = ["native", "portable"]  # type: ignore[assignment]  # schema is plain data
        schema = {**schema, "properties": {**schema["properties"], "engine_mode": mode}}
        data = merge(data, change, null_keeps=False)
        _refuse(data, schema, shown)
    full = with_defaults({"engine_mode": "native", **data}, schema)
    _refuse_options(full["options"], shown)
    profile: Profile = build(Profile, {**full, "name": name})
    return profile


@functools.cache
def load_guard_rails(*, checkout: Path = CHECKOUT) -> tuple[GuardRail, ...]:
    """Return the rules of ``catalog/guard_rails.yml``."""
    shown = "catalog/guard_rails.yml"
    data, problems = read_mapping(checkout / shown, shown=shown)
    if problems:
        raise CatalogError(problems)
    _refuse(data, load_schema("guard_rails", checkout=checkout), shown)
    return tuple(build(GuardRail, rail) for rail in data["rails"])


def with_defaults(data: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return ``data`` with the schema's defaults filled in, level by level."""
    full = dict(data)
    for key, part in schema.get("properties", {}).items():
        if key not in full and "default" in part:
            full[key] = part["default"]
        if isinstance(full.get(key), dict) and "properties" in part:
            full[key] = with_defaults(full[key], part)
        items = part.get("items")
        if isinstance(full.get(key), (list, tuple)) and isinstance(items, dict):
            full[key] = [with_defaults(i, items) if isinstance(i, dict) else i for i in full[key]]
    return full


def _model_data(name: str, checkout: Path) -> dict[str, Any]:
    shown = f"catalog/models/{name}.yml"
    data = _read("models", name, checkout)
    parent = data.pop("based_on", None)
    if parent is not None:
        below = _read("models", parent, checkout)
        if "based_on" in below:
            what = f"is based on {parent}, which is itself based on another model"
            raise CatalogError.one(shown, what, f"base it on {below['based_on']} directly")
        data = merge(below, data, null_keeps=False)
    schema = load_schema("model", checkout=checkout)
    _refuse(data, schema, shown)
    return with_defaults(data, schema)


def _read(kind: str, name: str, checkout: Path) -> dict[str, Any]:
    shown = f"catalog/{kind}/{name}.yml"
    known = catalog_names(kind, checkout=checkout)
    if name not in known:
        raise CatalogError.one(shown, "does not exist", f"known here: {', '.join(known)}")
    data, problems = read_mapping(checkout / shown, shown=shown)
    if problems:
        raise CatalogError(problems)
    return data


def _refuse(data: dict[str, Any], schema: dict[str, Any], shown: str) -> None:
    problems = list(problems_of(data, schema, lambda path: shown))
    if problems:
        raise CatalogError(problems)


def _refuse_options(options: dict[str, Any], shown: str) -> None:
    problems = [
        Problem(f"{shown}: options.{option}", what, fix)
        for option, what, fix in option_problems(options)
    ]
    if problems:
        raise CatalogError(problems)


def field_names(cls: type[Any]) -> tuple[str, ...]:
    """Return the fields of a dataclass, for tests that compare them with a schema."""
    return tuple(field.name for field in dataclasses.fields(cls))
