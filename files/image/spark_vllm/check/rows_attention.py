"""Rows of the TurboQuant backend and of our own LM head."""

from __future__ import annotations

from spark_vllm.check.row import Row
from spark_vllm.check.rules import Does, Exists, Takes

TURBOQUANT = "vllm.v1.attention.backends.turboquant_attn"
EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
OURS = "turboquant.py"
HEAD = "lm_head.py"

ROWS: tuple[Row, ...] = (
    Row(f"{TURBOQUANT}:TurboQuantAttentionBackend", Exists(), "base class", OURS),
    Row(f"{TURBOQUANT}:TurboQuantAttentionBackend.get_impl_cls", Takes(), "overridden", OURS),
    Row(f"{TURBOQUANT}:TurboQuantAttentionBackend.get_builder_cls", Takes(), "overridden", OURS),
    Row(f"{TURBOQUANT}:TurboQuantAttentionImpl", Exists(), "base class", OURS),
    Row(f"{TURBOQUANT}:TurboQuantMetadata", Exists(), "copied with other rows", OURS),
    Row(f"{TURBOQUANT}:TurboQuantMetadataBuilder", Exists(), "base class", OURS),
    Row(
        f"{TURBOQUANT}:TurboQuantMetadataBuilder.__init__",
        Does(("self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)",)),
        "upstream still verifies drafts as prompts; once it does not, this backend must go",
        OURS,
    ),
    Row(
        f"{TURBOQUANT}:TurboQuantMetadataBuilder._cudagraph_support",
        Exists(),
        "verify steps are captured as uniform batches",
        OURS,
    ),
    Row(f"{TURBOQUANT}:TurboQuantMetadataBuilder._reserve_workspace", Takes(), "extended", OURS),
    Row(
        f"{TURBOQUANT}:TurboQuantMetadataBuilder.build",
        Takes(("common_prefix_len", "common_attn_metadata", "fast_build")),
        "extended: a batch without prompts is all decode",
        OURS,
    ),
    Row(
        f"{TURBOQUANT}:TurboQuantAttentionImpl._decode_attention",
        Takes(
            ("query", "kv_cache", "attn_metadata"),
            keywords=("Pi", "centroids"),
        ),
        "called with one row per token",
        OURS,
    ),
    Row(
        f"{TURBOQUANT}:TurboQuantAttentionImpl._prefill_attention",
        Takes(
            ("query", "key", "value", "kv_cache", "attn_metadata"),
            keywords=("Pi", "centroids"),
        ),
        "called with a maximum that keeps it off the path for fresh prompts",
        OURS,
    ),
    Row(
        f"{TURBOQUANT}:TurboQuantAttentionImpl._prefill_attention",
        Does(("attn_metadata.max_query_len == attn_metadata.max_seq_len",)),
        "the test our maximum answers",
        OURS,
    ),
    Row("vllm.config:get_current_vllm_config", Exists(), "whether drafts are verified", OURS),
    Row(
        "vllm.v1.worker.workspace:current_workspace_manager",
        Exists(),
        "scratch for every token of a verify step",
        OURS,
    ),
    Row(
        "vllm.v1.worker.workspace:is_workspace_manager_initialized",
        Exists(),
        "scratch for every token of a verify step",
        OURS,
    ),
    Row(
        "vllm.v1.attention.backends.registry:register_backend",
        Takes(("backend", "class_path")),
        "puts our backend in the place of the engine's",
        "register.py",
    ),
    Row(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum",
        Exists(),
        "puts our backend in the place of the engine's",
        "register.py",
    ),
    Row(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.TURBOQUANT",
        Exists(),
        "puts our backend in the place of the engine's",
        "register.py",
    ),
    Row("vllm.model_executor.utils:set_weight_attrs", Exists(), "attributes of the weight", HEAD),
    Row(
        f"{EMBEDDING}:UnquantizedEmbeddingMethod.create_weights",
        Takes(
            (
                "layer",
                "input_size_per_partition",
                "output_partition_sizes",
                "input_size",
                "output_size",
                "params_dtype",
            )
        ),
        "the head's method is called like this one",
        HEAD,
    ),
    Row(
        f"{EMBEDDING}:UnquantizedEmbeddingMethod.apply",
        Takes(("layer", "x", "bias")),
        "the head's method is called like this one",
        HEAD,
    ),
)
