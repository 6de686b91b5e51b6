"""Engine options and variables that cannot load code or files.

The guard rail `unlisted-option` rejects all others unless the owner overrides it.
tests/engine/test_allowed_options.py compares these lists with the sources of vLLM.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

RULE = "unlisted-option"
NOT_LISTED = (
    "this option or variable is not on the list of reviewed names, or its value could be a path"
)
FIX = f"to allow it after a review, set it under engine, with override_rails: {{{RULE}: REASON}}"

# Their values are numbers, switches and words.
_OPTIONS = """
all2all-backend allow-deprecated-quantization async-scheduling attention-backend block-size
chat-template-content-format convert cpu-distributed-timeout-seconds cudagraph-capture-sizes
cudagraph-metrics data-parallel-size dbo-decode-token-threshold dbo-prefill-token-threshold
decode-context-parallel-size disable-cascade-attn disable-chunked-mm-input disable-custom-all-reduce
disable-fastapi-docs disable-hybrid-kv-cache-manager disable-log-stats disable-sliding-window
disable-uvicorn-access-log distributed-timeout-seconds dtype enable-auto-tool-choice
enable-chunked-prefill enable-dbo enable-ep-weight-filter enable-eplb enable-expert-parallel
enable-flashinfer-autotune enable-force-include-usage enable-layerwise-nvtx-tracing
enable-log-deltas enable-log-outputs enable-log-requests enable-logging-iteration-details
enable-lora enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint
enable-mfu-metrics enable-prompt-tokens-details enable-request-id-headers
enable-server-load-tracking enforce-eager exclude-tools-when-tool-choice-none
expert-placement-strategy fail-on-environ-validation fully-sharded-loras gdn-prefill-backend
h11-max-header-count h11-max-incomplete-event-size interleave-mm-strings jit-monitor-mode
jit-monitor-verbose kda-decode-backend kda-prefill-backend kv-cache-dtype-skip-layers
kv-cache-metrics kv-cache-metrics-sample kv-sharing-fast-prefill linear-backend load-format
log-error-stack logprobs-mode long-prefill-token-threshold long-prefill-token-threshold-adaptive
lora-dtype mamba-backend mamba-block-size mamba-cache-dtype mamba-cache-mode
mamba-cache-philox-rounds mamba-ssm-cache-dtype mamba-ssu-algorithm max-cpu-loras
max-cudagraph-capture-size max-log-len max-logprobs max-lora-rank max-loras max-num-active-seqs
max-num-queued-reqs max-num-queued-tokens max-num-scheduled-tokens max-parallel-loading-workers
mm-device-do-normalize mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-only
mm-encoder-tp-mode mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-cache-gb
mm-processor-cache-type mm-shm-cache-max-object-size-mb model-impl moe-backend monokernel nnodes
optimization-level per-request-spec-decode-metrics performance-mode pipeline-parallel-size
prefill-context-parallel-size prefill-schedule-interval prefix-cache-retention-interval
prefix-caching-hash-algo prefix-match-unit reasoning-parser renderer-num-workers
replayssm-buffer-len return-tokens-as-token-ids safetensors-load-strategy
safetensors-prefetch-block-size safetensors-prefetch-num-threads scheduler-reserve-full-isl
scheduling-policy seed show-hidden-metrics-for-version shutdown-timeout skip-mm-profiling
skip-tokenizer-init sparse-indexer-topk-backend spec-tokens sse-keep-alive-interval stream-interval
swa-bounded-replay tensor-parallel-size tokenizer-mode tool-call-parser tool-strict-level
trust-remote-code ubatch-size use-fp64-gumbel use-replayssm use-tqdm-on-load uvicorn-log-level
video-pruning-method video-pruning-rate watermark
"""
_ROPE = """
attention_factor beta_fast beta_slow factor long_factor mrope_interleaved mrope_section
original_max_position_embeddings partial_rotary_factor rope_theta rope_type short_factor type
"""
# Keys of JSON options; `*` stands for any key.
_KEYS = {
    "additional-config.spark": "lm_head lm_head_kernel ngram_cache_mib",
    "attention-config": """
        backend disable_flashinfer_q_quantization flash_attn_max_num_splits_for_cuda_graph
        flash_attn_version mla_prefill_backend tq_max_kv_splits_for_cuda_graph
        use_prefill_query_quantization use_trtllm_attention
        """,
    "compilation-config": """
        compile_mm_encoder compile_ranges_endpoints compile_sizes cudagraph_capture_sizes
        cudagraph_copy_inputs cudagraph_mm_encoder cudagraph_mode cudagraph_num_of_warmups
        cudagraph_specialize_lora custom_ops fast_moe_cold_start max_cudagraph_capture_size mode
        splitting_ops use_inductor_graph_partition
        """,
    "compilation-config.dynamic_shapes_config": "assume_32_bit_indexing evaluate_guards type",
    "compilation-config.pass_config": """
        eliminate_noops enable_qk_norm_rope_fusion fi_allreduce_fusion_max_size_mb fuse_act_padding
        fuse_act_quant fuse_allreduce_rms fuse_attn_quant fuse_norm_quant fuse_rope_kvcache
        rope_kvcache_fusion_max_token_num
        """,
    "default-chat-template-kwargs": "enable_thinking preserve_thinking reasoning_effort thinking",
    "eplb-config": "log_balancedness num_redundant_experts step_interval use_async window_size",
    "hf-overrides": "max_position_embeddings rope_theta",
    "hf-overrides.quantization_config": "quant_method",
    "hf-overrides.rope_parameters": _ROPE,
    "hf-overrides.rope_scaling": _ROPE,
    "hf-overrides.text_config": "max_position_embeddings rope_theta",
    "hf-overrides.text_config.rope_parameters": _ROPE,
    "hf-overrides.text_config.rope_scaling": _ROPE,
    "kernel-config": """
        enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup linear_backend
        moe_backend monokernel sparse_indexer_topk_backend
        """,
    "limit-mm-per-prompt": "audio image video",
    "limit-mm-per-prompt.audio": "count length",
    "limit-mm-per-prompt.image": "count height width",
    "limit-mm-per-prompt.video": "count height num_frames width",
    "override-generation-config": """
        max_new_tokens min_p repetition_penalty temperature top_k top_p
        """,
    "pooler-config": """
        dimensions enable_chunked_processing max_embed_len pooling_type seq_pooling_type
        tok_pooling_type use_activation
        """,
    "quantization-config.linear": "activation weight",
    "quantization-config.moe": "activation weight",
    "quantization-config.targets": "*",
    "speculative-config": """
        attention_backend disable_padded_drafter_batch draft_sample_method enforce_eager
        kv_cache_dtype max_model_len moe_backend num_speculative_tokens parallel_drafting
        prompt_lookup_max prompt_lookup_min rejection_sample_method
        suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
        suffix_decoding_max_tree_depth suffix_decoding_min_token_prob use_heterogeneous_vocab
        """,
    "structured-outputs-config": """
        backend disable_additional_properties disable_any_whitespace enable_in_reasoning
        reasoning_parser
        """,
}
# Options whose other values could name classes or files.
_METHODS = {"dflash", "dspark", "eagle", "eagle3", "mtp", "ngram", "ngram_gpu", "suffix"}
_WORDS = {
    "compilation-config.backend": {"", "eager", "inductor"},
    "distributed-executor-backend": {"mp", "ray", "uni"},
    "generation-config": {"auto", "vllm"},
    "spec-method": _METHODS,
    "speculative-config.method": _METHODS,
}
_TEXT = "chat-template"  # rendered in Jinja's sandbox
ALLOWED_OPTIONS = {
    *_OPTIONS.split(),
    *(f"{option}.{key}" for option, keys in _KEYS.items() for key in keys.split()),
    *_WORDS,
    _TEXT,
}
_PARENTS = {path[: dot.start()] for path in ALLOWED_OPTIONS for dot in re.finditer(r"\.", path)}

# Names after VLLM_. Other guard rails cover insecure serialization and logged prompts. VLLM_PLUGINS
# only selects installed plugins, which otherwise all load.
_VLLM = """
ALLOW_INSECURE_SERIALIZATION ALLOW_LONG_MAX_MODEL_LEN ALLREDUCE_USE_FLASHINFER
ALLREDUCE_USE_SYMM_MEM AUDIO_FETCH_TIMEOUT BATCH_INVARIANT BLOCKSCALE_FP8_GEMM_FLASHINFER
COMPUTE_NANS_IN_LOGITS CPU_KVCACHE_SPACE CPU_NUM_OF_RESERVED_CPU CPU_OMP_THREADS_BIND
DEEP_GEMM_WARMUP DISABLED_KERNELS DISABLE_COMPILE_CACHE DISABLE_LOG_LOGO DISABLE_PYNCCL
DISABLE_SHARED_EXPERTS_STREAM DO_NOT_TRACK ENABLE_CUDAGRAPH_GC ENABLE_FLA_PACKED_RECURRENT_DECODE
ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING ENABLE_INDUCTOR_MAX_AUTOTUNE ENABLE_RESPONSES_API_STORE
ENABLE_V1_MULTIPROCESSING ENFORCE_STRICT_TOOL_CALLING ENGINE_READY_TIMEOUT_S
EXECUTE_MODEL_TIMEOUT_SECONDS FASTSAFETENSORS_QUEUE_SIZE FLASHINFER_ALLREDUCE_BACKEND
FLASHINFER_WORKSPACE_BUFFER_SIZE FLOAT32_MATMUL_PRECISION GDN_DECODE_KERNEL HTTP_TIMEOUT_KEEP_ALIVE
IMAGE_FETCH_TIMEOUT KV_CACHE_LAYOUT LOGGING_COLOR LOGGING_LEVEL LOG_BATCHSIZE_INTERVAL
LOG_MODEL_INSPECTION LOG_STATS_INTERVAL MARLIN_INPUT_DTYPE MARLIN_USE_ATOMIC_ADD MAX_IMAGE_PIXELS
MAX_N_SEQUENCES MAX_STOP_STRINGS MEDIA_LOADING_THREAD_COUNT MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
MLA_DISABLE MOE_SKIP_PADDING MOE_USE_DEEP_GEMM MSGPACK_ZERO_COPY_THRESHOLD NO_USAGE_STATS PLUGINS
RAISE_ON_LOGIT_NANS REGEX_COMPILATION_TIMEOUT_S REQUEST_BODY_LOG_LEVEL RINGBUFFER_WARNING_INTERVAL
SKIP_MODEL_NAME_VALIDATION SKIP_P2P_CHECK SPARSE_INDEXER_MAX_LOGITS_MB SSM_CONV_STATE_LAYOUT
TOOL_JSON_ERROR_AUTOMATIC_RETRY TOOL_PARSE_REGEX_TIMEOUT_SECONDS TRITON_FORCE_FIRST_CONFIG
TRITON_JIT_WARMUP_NUM_THREADS USE_AOT_COMPILE USE_BREAKABLE_CUDAGRAPH USE_DEEP_GEMM
USE_DEEP_GEMM_E8M0 USE_DEEP_GEMM_TMA_ALIGNED_SCALES USE_FLASHINFER_MOE_INT4 USE_FLASHINFER_SAMPLER
USE_FUSED_MOE_GROUPED_TOPK USE_NCCL_SYMM_MEM USE_STANDALONE_COMPILE USE_TRITON_AWQ
USE_V2_MODEL_RUNNER V1_OUTPUT_PROC_CHUNK_SIZE VIDEO_FETCH_TIMEOUT WORKER_MULTIPROC_METHOD
WORKER_SHUTDOWN_TIMEOUT_SECONDS XGRAMMAR_CACHE_MB
"""
# Recipes still set these variables of older engines; vLLM 0.30 to 0.33 ignores them (envs.py).
IGNORED_VARIABLES = (
    "VLLM_ATTENTION_BACKEND",
    "VLLM_FLASH_ATTN_VERSION",
    "VLLM_FLASHINFER_FORCE_TENSOR_CORES",
    "VLLM_FLASHINFER_MOE_BACKEND",
    "VLLM_USE_FLASHINFER_MOE_FP4",
    "VLLM_USE_TRTLLM_ATTENTION",
    "VLLM_USE_V1",
)
# Variables of libraries; STUB_* are for the virtual lab's engine stub.
_LIBRARIES = """
CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING
CUDA_VISIBLE_DEVICES FLASHINFER_CUDA_ARCH_LIST FLASHINFER_DISABLE_VERSION_CHECK
FLASHINFER_NVCC_THREADS GLOO_SOCKET_IFNAME HF_HUB_DISABLE_TELEMETRY HF_HUB_OFFLINE MAX_JOBS
MKL_NUM_THREADS NCCL_ALGO NCCL_BUFFSIZE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_DEBUG
NCCL_DEBUG_SUBSYS NCCL_IB_[A-Z0-9_]+ NCCL_IGNORE_CPU_AFFINITY NCCL_MAX_NCHANNELS NCCL_MIN_NCHANNELS
NCCL_NET_GDR_LEVEL NCCL_NTHREADS NCCL_NVLS_ENABLE NCCL_P2P_(DISABLE|LEVEL) NCCL_PROTO
NCCL_SHM_DISABLE NCCL_SOCKET_[A-Z0-9_]+ NVCC_THREADS OMP_NUM_THREADS OMP_WAIT_POLICY
OPENBLAS_NUM_THREADS PYTORCH_(CUDA_)?ALLOC_CONF SAFETENSORS_FAST_GPU STUB_[A-Z_]+
TORCHINDUCTOR_COMPILE_THREADS TORCH_CUDA_ARCH_LIST TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD
TORCH_USE_CUDA_DSA TP_SOCKET_IFNAME TRANSFORMERS_OFFLINE UCX_NET_DEVICES
"""
ALLOWED_VARIABLES = (
    *(f"VLLM_{name}" for name in _VLLM.split()),
    *IGNORED_VARIABLES,
    *_LIBRARIES.split(),
)
_VARIABLE = re.compile("|".join(ALLOWED_VARIABLES))
# Values that cannot be a path; values of options cannot be a Python module either.
_WORD = re.compile(r"[\w :,+-]*|\d+(\.\d+)+\w*", re.ASCII)
_VALUE = re.compile(r"[\w .:,;=^+@%-]*", re.ASCII)


def find_unlisted(options: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the dotted keys of the options and variables that are not on the lists."""
    paths = [
        f"options.{path}"
        for option, value in options.items()
        if value is not None
        for path in _unlisted(option, value)
    ]
    paths += [
        f"environment.{name}"
        for name, value in environment.items()
        if not (_VARIABLE.fullmatch(name) and _VALUE.fullmatch(value))
    ]
    return tuple(dict.fromkeys(paths))


def _unlisted(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and path in _PARENTS:
        allows_any_key = f"{path}.*" in ALLOWED_OPTIONS
        for key, item in value.items():
            yield from _unlisted(f"{path}.*" if allows_any_key else f"{path}.{key}", item)
        return
    items = value if isinstance(value, (list, tuple)) else [value]
    if path not in ALLOWED_OPTIONS or not all(_is_harmless(path, item) for item in items):
        yield path


def _is_harmless(path: str, value: Any) -> bool:
    if path in _WORDS:
        return isinstance(value, str) and value in _WORDS[path]
    if isinstance(value, str):
        return path == _TEXT or bool(_WORD.fullmatch(value))
    return value is None or isinstance(value, (bool, int, float))
