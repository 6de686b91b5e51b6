"""Rows of the TurboQuant backend and of our own LM head."""

from __future__ import annotations

from spark_vllm.check.row import Row
from spark_vllm.check.rules import Does, Exists, Takes

TURBOQUANT = "vllm.v1.attention.backends.turboquant_attn"
EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
OURS = "turboquant.py"
HEAD = "lm_head.py"
WAYS = "lm_head_ways.py"
NVML = "vllm.third_party.pynvml"
MARLIN = "vllm.model_executor.layers.quantization.utils.marlin_utils"

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
    Row(
        "vllm._custom_ops:gptq_marlin_repack",
        Takes(("b_q_weight",), keywords=("size_k", "size_n", "num_bits")),
        "repacks the INT8 rows for Marlin",
        WAYS,
    ),
    Row(
        f"{MARLIN}:marlin_permute_scales",
        Takes(("s",), keywords=("size_k", "size_n", "group_size")),
        "orders the scales for Marlin",
        WAYS,
    ),
    Row(f"{MARLIN}:marlin_make_empty", Takes(("device",)), "no zero points", WAYS),
    Row(f"{MARLIN}:marlin_make_workspace_new", Takes(("device",)), "locks of the kernel", WAYS),
    Row(
        f"{MARLIN}:apply_gptq_marlin_linear",
        Takes(
            ("input", "weight", "weight_scale", "weight_zp"),
            keywords=(
                "workspace",
                "wtype",
                "output_size_per_partition",
                "input_size_per_partition",
            ),
        ),
        "computes the head",
        WAYS,
    ),
    Row("vllm.scalar_type:scalar_types.uint8b128", Exists(), "INT8 with a bias of 128", WAYS),
    Row("vllm.scalar_type:scalar_types", Exists(), "names of the packed types", WAYS),
    Row(f"{NVML}:nvmlInit", Takes(), "names the driver", HEAD),
    Row(f"{NVML}:nvmlShutdown", Takes(), "names the driver", HEAD),
    Row(f"{NVML}:nvmlSystemGetDriverVersion", Takes(), "names the driver", HEAD),
)
