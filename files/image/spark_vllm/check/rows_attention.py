"""Rows of the TurboQuant backend."""

from __future__ import annotations

from spark_vllm.check.row import Row
from spark_vllm.check.rules import Does, Exists, Takes

TURBOQUANT = "vllm.v1.attention.backends.turboquant_attn"
OURS = "turboquant.py"

FIELDS = (
    "block_table",
    "is_prefill",
    "max_query_len",
    "max_seq_len",
    "num_actual_tokens",
    "num_decode_tokens",
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "seq_lens_cpu",
)
"""What of a batch's description is read or replaced."""

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
        Does(("AttentionCGSupport.UNIFORM_BATCH",)),
        "verify steps are captured as uniform batches; with another kind look again at all of it",
        OURS,
    ),
    Row(
        "vllm.v1.attention.backend:AttentionMetadataBuilder._init_reorder_batch_threshold",
        Takes(("reorder_batch_threshold", "supports_spec_as_decode")),
        "called a second time, so that verify rows count as decodes",
        OURS,
    ),
    Row(f"{TURBOQUANT}:TurboQuantMetadataBuilder._reserve_workspace", Takes(), "extended", OURS),
    Row(
        f"{TURBOQUANT}:TurboQuantMetadataBuilder._reserve_workspace",
        Does(
            (
                "max_num_reqs = scheduler_config.max_num_seqs",
                "model_config.get_num_attention_heads(parallel_config)",
                "self.kv_cache_spec.head_size",
                "self.vllm_config.attention_config.tq_max_kv_splits_for_cuda_graph",
                "((max_num_reqs, num_heads, max_num_splits, head_size + 1), torch.float32)",
                "((max_num_reqs, num_heads, head_size), model_config.dtype)",
                "((max_num_reqs, num_heads), torch.float32)",
            )
        ),
        "ours reserves the same buffers for more rows",
        OURS,
    ),
    Row(
        "vllm.v1.worker.workspace:WorkspaceManager.get_simultaneous",
        Takes(),
        "scratch for every token of a verify step",
        OURS,
    ),
    Row(
        f"{TURBOQUANT}:TurboQuantMetadataBuilder.build_for_cudagraph_capture",
        Does(("self.build(0, common_attn_metadata)", "attn_metadata.seq_lens.fill_(1)")),
        "a captured step is described by our builder too, with lengths of one",
        OURS,
    ),
    Row(
        f"{TURBOQUANT}:TurboQuantMetadataBuilder.build",
        Takes(("common_prefix_len", "common_attn_metadata", "fast_build")),
        "extended: a batch without prompts is all decode",
        OURS,
    ),
    Row(
        f"{TURBOQUANT}:TurboQuantMetadataBuilder.build",
        Does(
            (
                "split_decodes_and_prefills(cam, decode_threshold=self.reorder_batch_threshold)",
                "TurboQuantMetadata(seq_lens=cam.seq_lens, slot_mapping=cam.slot_mapping, "
                "block_table=cam.block_table_tensor, query_start_loc=cam.query_start_loc, "
                "num_actual_tokens=cam.num_actual_tokens, max_query_len=cam.max_query_len, "
                "max_seq_len=cam.max_seq_len, is_prefill=cam.max_query_len > 1, "
                "num_decodes=num_decodes, num_decode_tokens=num_decode_tokens, "
                "query_start_loc_cpu=cam.query_start_loc_cpu, "
                "seq_lens_cpu=cam.seq_lens_cpu_upper_bound)",
            )
        ),
        "lengths on the device are exact, those on the CPU an upper bound",
        OURS,
    ),
    *(
        Row(f"{TURBOQUANT}:TurboQuantMetadata.{name}", Exists(), "describes a batch", OURS)
        for name in FIELDS
    ),
    Row(
        f"{TURBOQUANT}:TurboQuantAttentionImpl.__init__",
        Does(("get_current_vllm_config()",)),
        "ours asks for the configuration at the same place",
        OURS,
    ),
    Row(
        f"{TURBOQUANT}:TurboQuantAttentionImpl.forward",
        Does(
            (
                "not attn_metadata.is_prefill",
                "self._decode_attention(q, kv_cache, attn_metadata, Pi, centroids, PiT, layer)",
                "attn_metadata.query_start_loc[:num_decodes + 1]",
                "attn_metadata.seq_lens_cpu[num_decodes:]",
            )
        ),
        "decodes come first and with their starts, prompts with lengths of their own",
        OURS,
    ),
    Row(
        f"{TURBOQUANT}:TurboQuantAttentionImpl._decode_attention",
        Does(
            ("query.shape[0]", "attn_metadata.seq_lens", "attn_metadata.block_table"),
        ),
        "reads one length and one row of blocks for each row of the query, on the device",
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
)
