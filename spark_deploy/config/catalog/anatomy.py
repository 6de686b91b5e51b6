"""Facts from the headers and config.json of a repository at a commit, stored in the lock."""

from typing import Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass
from pydantic.json_schema import SkipJsonSchema
from spark_contract.units import COMMIT

from spark_deploy.config.documents import CLOSED, FromKey


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class CacheLayers:
    """Layers that cache the same data of a request."""

    kind: Literal["full", "sliding", "latent", "state"]
    """full and sliding: keys and values; latent: MLA; state: fixed size per request."""
    layers: int = Field(ge=1, description="Number of layers.")
    token_bytes: int = Field(default=0, ge=0, description="Per layer and token, in 16 bit.")
    window_tokens: int = Field(
        default=0, ge=0, description="Size of the sliding attention window, in tokens."
    )
    state_bytes: int = Field(default=0, ge=0, description="Per layer and request.")
    draft_state_bytes: int = Field(default=0, ge=0)
    """Additional bytes per draft token."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class MeasuredCache:
    """KV-cache size measured by an engine because it cannot be computed."""

    kv_cache: str = Field(description="Cache type that was measured.")
    context_tokens: int = Field(ge=1, description="Maximum context of that engine.")
    token_bytes: int = Field(ge=1, description="Bytes per token over all layers.")
    by: str = Field(max_length=200, description="Host and release of the measurement.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Anatomy:
    """Facts from headers and config.json at a commit."""

    repository: FromKey
    commit: str = Field(json_schema_extra={"pattern": f"^{COMMIT}$"})
    """The commit that was read."""
    leave_out: tuple[str, ...] = ()
    """Shell patterns of files that are not downloaded and were not read."""
    architecture: str = Field(default="", description="Class that config.json names.")
    model_type: str = Field(default="", description="Type that config.json names.")
    quantization: str = ""
    """Quantization in config.json; empty: none."""
    weights: dict[str, int] = Field(
        default_factory=dict,
        json_schema_extra={"additionalProperties": {"type": "integer", "minimum": 0}},
    )
    """Bytes that are always loaded, by dtype."""
    repeats_names: bool = Field(default=False, description="Some tensors are stored twice.")
    vision_bytes: int = Field(default=0, ge=0)
    """Bytes of the vision and audio towers and projectors."""
    drafter_bytes: int = Field(default=0, ge=0)
    """Bytes of the built-in drafter."""
    context_tokens: PositiveInt | SkipJsonSchema[None] = None
    """Maximum context in config.json."""
    width: PositiveInt | SkipJsonSchema[None] = Field(default=None, description="hidden_size.")
    expert_width: PositiveInt | SkipJsonSchema[None] = None
    """moe_intermediate_size."""
    cache: tuple[CacheLayers, ...] = Field(default=(), description="Cache of each kind of layer.")
    cache_unknown: str = ""
    """Why the KV cache cannot be computed; empty if it can."""
    counted: MeasuredCache | SkipJsonSchema[None] = None
    """Cache size that an engine counted, if unknown; `update --counted` writes it."""

    @property
    def weights_bytes(self) -> int:
        return sum(self.weights.values())
