"""Sizes of a model's layers: from the catalog, or from a repository's headers and config.json."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass
from pydantic.json_schema import SkipJsonSchema
from spark_contract.units import COMMIT

from spark_deploy.config.documents import CLOSED, FromKey, Violation


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class LinearAttention:
    """Sizes of a gated delta net."""

    key_heads: int = Field(ge=1, description="linear_num_key_heads.")
    value_heads: int = Field(ge=1, description="linear_num_value_heads.")
    head_width: int = Field(ge=1, description="linear_key_head_dim and linear_value_head_dim.")
    kernel: int = Field(default=4, ge=1, description="linear_conv_kernel_dim.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class SparseAttention:
    """Sizes of the indexer that selects the keys of a query (QSA)."""

    index_heads: int = Field(ge=1, description="indexer_n_heads.")
    index_width: int = Field(ge=1, description="indexer_head_dim.")
    compression: int = Field(ge=1, description="indexer_compress_ratio: tokens per cached key.")
    budget: int = Field(ge=1, description="indexer_budget: tokens that a query attends to.")

    def ring_tokens(self, drafts: int) -> int:
        """Return the maximum number of tokens of a request that are not compressed yet."""
        return -(-(self.compression + drafts) // self.compression) * self.compression


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class HyperConnections:
    """Sizes of the mixers of a residual stream that consists of several streams."""

    streams: int = Field(ge=1, description="hc_count.")
    rank: int = Field(ge=1, description="hc_lowrank.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class NgramTable:
    """Embedding table of n-grams; a token reads a few of its rows (config.json: ple_*)."""

    rows: int = Field(ge=1, description="Rows of the padded table.")
    width: int = Field(ge=1, description="ple_embed_dim divided by the rows per token.")
    rows_per_token: int = Field(ge=1, description="(ngram_size - 1) * heads_per_ngram.")
    format: Literal["bf16", "fp8"] = Field(description="How the base stores the table.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Architecture:
    """Numbers from config.json, from which sizes are computed."""

    layers: int = Field(ge=1, description="Layers of the language model.")
    full_attention_every: int = Field(ge=1)
    """Every n-th layer has full attention; the rest are gated delta nets."""
    hidden: int = Field(ge=1, description="hidden_size.")
    vocabulary: int = Field(ge=1, description="vocab_size.")
    experts: int = Field(ge=1, description="Experts per layer.")
    experts_per_token: int = Field(ge=1, description="Routed experts per token.")
    expert_width: int = Field(ge=1, description="moe_intermediate_size.")
    shared_expert_width: int = Field(ge=1, description="shared_expert_intermediate_size.")
    attention_heads: int = Field(ge=1)
    """num_attention_heads; queries are gated, so their projection is twice as wide."""
    kv_heads: int = Field(ge=1, description="num_key_value_heads.")
    head_width: int = Field(ge=1, description="head_dim.")
    linear_attention: LinearAttention | None = None
    """Sizes of the gated delta nets; null when every layer has full attention."""
    mtp_layers: int = Field(ge=0, description="Layers of the built-in drafter; 0 for none.")
    mtp_scheme: Literal["bf16", "int4"]
    """How the MTP experts and attention are stored."""
    vision_bytes: int = Field(ge=0, description="Bytes of the vision tower.")
    max_context_tokens: int = Field(ge=1, description="max_position_embeddings, in tokens.")
    experts_scheme: Literal["int4", "nvfp4"] = "int4"
    """How the base stores the routed experts."""
    attention_scheme: Literal["int4", "bf16"] = "int4"
    """How the base stores the projections of full attention and gated delta nets."""
    sparse_attention: SparseAttention | None = None
    """Sizes of the indexer in the layers with full attention; null for none."""
    hyper_connections: HyperConnections | None = None
    """Sizes of the hyper-connections, two per layer; null for none."""
    ngram_table: NgramTable | None = None
    """Table of n-gram embeddings; null for none. The profile chooses where it is kept."""

    @property
    def attention_layers(self) -> int:
        return self.layers // self.full_attention_every

    @property
    def linear_layers(self) -> int:
        return self.layers - self.attention_layers

    def violations(self) -> Iterator[Violation]:
        if self.linear_layers and self.linear_attention is None:
            message = f"must be set, because {self.linear_layers} layers have linear attention"
            fix = "add the sizes, or set full_attention_every: 1"
            yield Violation(("linear_attention",), message, fix)


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class CacheLayers:
    """Layers that cache data of the same shape for each request."""

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
class RepoMetadata:
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
    measured: MeasuredCache | SkipJsonSchema[None] = None
    """Cache size measured by an engine, if unknown; `update --from-hosts` writes it."""

    @property
    def weights_bytes(self) -> int:
        return sum(self.weights.values())
