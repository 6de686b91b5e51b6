"""Compute the engine's arguments and environment, and the log lines that confirm them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from spark_contract.builder_api import TOKEN_IDS, expand_all
from spark_contract.paths import ENGINE_SOCKET, ENGINE_USER

from spark_deploy.config.catalog.model import HybridModel, Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.engine import (
    canonical_name,
    canonical_options,
    decode_mapping,
    option_values,
)
from spark_deploy.plan.kv_cache import context_tokens, prefill_backend
from spark_deploy.plan.memory import NGRAM_CACHE_BYTES, adapter_rank, served_architecture
from spark_deploy.plan.types import ImagePlan, MemoryPlan


def pins_drafter_experts(model: Model, profile: Profile) -> bool:
    """Return whether the plan chooses the kernel of the MTP layer's experts.

    The engine's default for 16-bit experts depends on the GPU; for INT4 experts it is always
    Marlin. An engine without a GPU has no Triton.
    """
    drafts = profile.speculation
    if drafts is None or not drafts.uses_model_layers or profile.engine_mode == "portable":
        return False
    if isinstance(model, HybridModel):
        return served_architecture(model.architecture, profile).mtp_scheme == "bf16"
    return _has_16_bit_experts(model)


def pins_target_experts(model: Model, profile: Profile) -> bool:
    """Return whether the plan chooses the kernel of a published model's 16-bit experts."""
    options = canonical_options(profile.options)
    is_configured = "moe-backend" in options or "moe_backend" in (
        options.get("kernel-config") or {}
    )
    stays_16_bit = not (quantizes_online(profile) or "quantization" in options)
    return (
        isinstance(model, PlainModel)
        and _has_16_bit_experts(model)
        and profile.engine_mode != "portable"
        and not loads_unlisted_model(profile)
        and stays_16_bit
        and not is_configured
    )


def _has_16_bit_experts(model: PlainModel) -> bool:
    metadata = model.metadata
    return metadata is not None and metadata.expert_width is not None and not metadata.quantization


def quantizes_online(profile: Profile) -> bool:
    return "quantization-config" in profile.options


def loads_unlisted_model(profile: Profile) -> bool:
    """Return whether vLLM loads architectures that it does not list."""
    return canonical_options(profile.options).get("model-impl") in ("transformers", "terratorch")


def extends_context(profile: Profile) -> bool:
    """Return whether options change the position encoding, as for longer contexts."""
    return "rope" in str(canonical_options(profile.options).get("hf-overrides", "")).lower()


MODEL_MOUNT = "/model"
CACHE_MOUNT = "/cache"
DRAFTER_MOUNT = "/drafter"
ADAPTERS_MOUNT = "/adapters"
VOCABULARY_MOUNT = "/draft-vocabulary"
HEAD_TIMINGS_PATH = f"{CACHE_MOUNT}/spark-lm-head.json"
"""Measurement of the opt-in head, written on the first start on a host."""

# Our results were measured without both. Autotuning runs FlashInfer's kernels with loaded weights;
# the warm-up compiles kernels that may never be used.
KERNEL_CONFIG = {"enable_flashinfer_autotune": False, "enable_jit_warmup": False}

# `docker run` arguments of every release; GPU arguments follow from the host. Reasons:
# docs/decisions/0004.
CONTAINER_ARGUMENTS = (
    "--pull=never",  # only images that the host already has
    "--network=none",
    "--ipc=private",
    # An engine on a single GPU shares little memory between processes.
    "--shm-size=2g",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--read-only",
    # Compilers build and load libraries there, as in the cache.
    "--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777,size=4g",
    # Includes threads: compilers start several per core.
    "--pids-limit=8192",
)


def container_arguments(cpuset_cpus: str | None) -> tuple[str, ...]:
    return (*CONTAINER_ARGUMENTS, *((f"--cpuset-cpus={cpuset_cpus}",) if cpuset_cpus else ()))


def option_arguments(options: Mapping[str, Any]) -> list[str]:
    """Turn a mapping into arguments, in order.

    ``True`` is a flag, ``False`` its ``--no-`` form, ``None`` omits the option, a list gives
    several values and a mapping becomes compact JSON.
    """
    arguments: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if value is True:
            arguments.append(flag)
        elif value is False:
            arguments.append(f"--no-{flag.removeprefix('--')}")
        elif isinstance(value, Mapping):
            arguments += [flag, json.dumps(value, separators=(",", ":"), sort_keys=True)]
        elif isinstance(value, (list, tuple)):
            arguments += [flag, *(_text_value(name, item) for item in value)]
        else:
            arguments += [flag, _text_value(name, value)]
    return arguments


def engine_options(model: Model, profile: Profile, memory: MemoryPlan) -> dict[str, Any]:
    """Return the options of ``vllm serve`` that follow from model, profile and memory plan."""
    portable = profile.engine_mode == "portable"
    plain = model if isinstance(model, PlainModel) else None
    # The engine cannot omit the vision tower without the audio tower.
    can_omit_vision = plain is None or (plain.vision and not plain.audio)
    context, long_prompt = context_tokens(model, profile), profile.limits.long_prompt_tokens
    return {
        # The watchdog polls these every few seconds.
        "disable-access-log-for-endpoints": "/health,/metrics",
        **option_values(profile.limits, profile.kv_cache),
        "max-model-len": context,
        # The engine rejects a limit above its context.
        "long-prefill-token-threshold": min(long_prompt, context) if long_prompt else None,
        "gpu-memory-utilization": memory.memory_fraction,
        "kv-cache-dtype": None if profile.kv_cache.dtype == "auto" else profile.kv_cache.dtype,
        "load-format": "spark_portable" if portable else profile.load_format,
        "enable-prefix-caching": profile.prefix_caching,
        "language-model-only": True if can_omit_vision and not profile.vision else None,
        "runner": "pooling" if plain and plain.pools else None,
        "reasoning-parser": model.parsers.reasoning,
        "enable-auto-tool-choice": True if model.parsers.tool_call else None,
        "tool-call-parser": model.parsers.tool_call,
        "chat-template": model.fixed_template_text if profile.template_fixes else None,
        "speculative-config": _speculative_config(model, profile),
        **_adapter_options(model),
        **_extra_options(model, profile),
    }


def _speculative_config(model: Model, profile: Profile) -> Mapping[str, Any] | None:
    drafts = profile.speculation
    if drafts is None:
        return None
    config: dict[str, Any] = {"method": drafts.method, "num_speculative_tokens": drafts.tokens}
    if drafts.repository:
        config["model"] = DRAFTER_MOUNT
        if profile.engine_mode == "portable":
            # The portable format is for checkpoints built here, not for drafters.
            config["draft_load_config"] = {"load_format": "safetensors"}
    if pins_drafter_experts(model, profile):
        # The default on a GB10 is FlashInfer CUTLASS, with up to 85 files to compile while weights
        # are loaded. Proofs ran with Triton. The global moe-backend would also affect the model's
        # INT4 experts.
        config["moe_backend"] = "triton"
    optional = {
        "draft_sample_method": drafts.draft_sample_method,
        "rejection_sample_method": drafts.rejection_sample_method,
        "num_speculative_tokens_per_batch_size": drafts.num_speculative_tokens_per_batch_size,
        "prompt_lookup_max": drafts.longest_match,
        "prompt_lookup_min": drafts.shortest_match,
    }
    return {**config, **{name: value for name, value in optional.items() if value is not None}}


def _adapter_options(model: Model) -> dict[str, Any]:
    if not model.adapters:
        return {}
    modules = [f"{name}={ADAPTERS_MOUNT}/{number}" for number, name in enumerate(model.adapters)]
    return {
        "enable-lora": True,
        "max-loras": len(modules),
        "max-lora-rank": adapter_rank(model),
        "lora-modules": modules,
    }


def _extra_options(model: Model, profile: Profile) -> dict[str, Any]:
    options = {canonical_name(name): value for name, value in profile.options.items()}
    options.setdefault("kernel-config", {})
    if options["kernel-config"] is not None:
        defaults = dict(KERNEL_CONFIG)
        if "enable-flashinfer-autotune" in canonical_options(options):
            del defaults["enable_flashinfer_autotune"]  # the engine rejects both spellings together
        options["kernel-config"] = {**defaults, **_mapping_option(options, "kernel-config")}
    spark: dict[str, Any] = {}
    if profile.head == "int8-triton":
        spark = {"lm_head": profile.head, "lm_head_times": HEAD_TIMINGS_PATH}
        if profile.speculation and profile.speculation.draft_vocabulary_tokens:
            spark["draft_vocabulary"] = profile.speculation.draft_vocabulary_tokens
            if profile.speculation.draft_vocabulary_text:
                spark["draft_vocabulary_file"] = f"{VOCABULARY_MOUNT}/{TOKEN_IDS}"
    if profile.ngram_table:
        # The engine's default is pinned host memory.
        options.setdefault("engram-config", {"cpu_offload": profile.ngram_table == "pinned"})
    if profile.ngram_table == "file":
        spark |= {"ngram_table": "file", "ngram_cache_mib": NGRAM_CACHE_BYTES >> 20}
    if spark:
        config = _mapping_option(options, "additional-config")
        options["additional-config"] = {**config, "spark": {**spark, **config.get("spark", {})}}
    if pins_target_experts(model, profile):
        # All experts are 16-bit, so the drafter's kernel suits the model too.
        options["moe-backend"] = "triton"
    return options


def _mapping_option(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = decode_mapping(options.get(name) or {})
    if not isinstance(value, Mapping):
        message = f"this option must be a mapping, not {value!r}, because spark-deploy adds keys"
        raise PlanError.single(f"engine option {name}", message, "write it as a mapping")
    return value


def engine_arguments(
    model: Model, profile: Profile, memory: MemoryPlan, names: Sequence[str]
) -> tuple[str, ...]:
    served = {"served-model-name": names}
    options = option_arguments(served | engine_options(model, profile, memory))
    return (MODEL_MOUNT, *options, "--uds", ENGINE_SOCKET)


def engine_environment(profile: Profile, image: ImagePlan, start_timeout_s: int) -> dict[str, str]:
    """Return the engine's environment; it contains no secret.

    The container has only a loopback interface; all libraries must use it.
    """
    environment = {
        # The account has no home and no name in the image; libraries need both.
        "HOME": CACHE_MOUNT,
        "USER": ENGINE_USER,
        "XDG_CACHE_HOME": CACHE_MOUNT,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Skips the warm-up: DeepGEMM is not used for this architecture.
        "VLLM_USE_DEEP_GEMM": "0",
        # Triton samples with top_k and top_p, as in the proofs; FlashInfer would compile kernels.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Compiling on all cores with loaded weights freezes the host.
        "MAX_JOBS": "2",
        "FLASHINFER_NVCC_THREADS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(start_timeout_s),
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "TRITON_CACHE_DIR": f"{CACHE_MOUNT}/triton",
        "CUDA_CACHE_PATH": f"{CACHE_MOUNT}/nv",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    }
    if image.plugin:
        environment["VLLM_PLUGINS"] = "spark"
    if profile.head == "int8-triton":
        # The head's measurement is valid for this image only.
        environment["SPARK_IMAGE"] = image.tag
    return {**environment, **profile.environment}


def rank_arguments(rank: int, addresses: Sequence[str], port: int) -> tuple[str, ...]:
    count = str(len(addresses))
    argv = ["--tensor-parallel-size", count, "--nnodes", count, "--node-rank", str(rank)]
    argv += ["--master-addr", addresses[0], "--master-port", str(port)]
    return (*argv, "--headless") if rank else tuple(argv)


def _text_value(name: str, value: Any) -> str:
    text = str(value)
    if text.startswith("-"):
        message = f"value {text!r} begins with '-' and would be parsed as an option"
        fix = "write it as a mapping, or remove it"
        raise PlanError.single(f"engine option {name}", message, fix)
    return text


PREFILL_LINES = {
    "triton": r"Using Triton/FLA GDN prefill kernel \(requested=triton\b",
    "flashinfer": r"Using FlashInfer GDN prefill kernel \(requested=flashinfer\b",
}
TRITON_EXPERTS_LINE = r"Using TRITON Unquantized MoE (LoRA )?backend"
# NCCL before 2.29.3 is reported to deadlock on this CPU after some minutes.
DEADLOCKING_NCCL_LINE = r"is using nccl==2\.(\d|1\d|2[0-8])\.|is using nccl==2\.29\.[0-2]\b"
_FINITE_LINE = r"spark: all numbers of \d+ tensors and the logits of \d+ heads of \w+ are finite"
_PORTABLE_LINE = r"spark portable mode: dequantized \d+ tensors to bfloat16"


def required_and_forbidden_lines(
    model: Model, profile: Profile, *, plugin: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the required and the forbidden log lines, as patterns."""
    required, forbidden = [*profile.check.log_required], [*profile.check.log_forbidden]
    if plugin and isinstance(model, HybridModel) and profile.shared_experts.startswith("fp8"):
        required.append(plugin_line(model))
    if plugin and profile.checkpoint_needs_plugin:
        required.append(_FINITE_LINE)
    required += prefill_line(model, profile)
    if pins_target_experts(model, profile) or pins_drafter_experts(model, profile):
        required.append(TRITON_EXPERTS_LINE)
    if plugin and profile.engine_mode == "portable":
        required.append(_PORTABLE_LINE)
    elif plugin:
        forbidden.append(r"spark portable mode")
    if plugin:
        forbidden += [r"Failed to load plugin", r"weight_scale_inv.* not found"]
    return tuple(required), tuple(forbidden)


def prefill_line(model: Model, profile: Profile) -> list[str]:
    line = PREFILL_LINES.get(prefill_backend(profile))
    has_linear_layers = isinstance(model, HybridModel) and model.architecture.linear_layers > 0
    return [line] if line and has_linear_layers else []


# Modules that the engine computes as one, as in checkpoint/names.py of the plugin.
_FUSED_INTO = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
    "in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz",
}  # fmt: skip
_FUSED = re.compile(rf"(?<=\.)({'|'.join(_FUSED_INTO)})$")


def plugin_line(model: HybridModel) -> str:
    """Return the pattern of the plugin's log line about the exact tensor sets."""
    names = expand_all(model.tensors.swap)
    modules = {_FUSED.sub(lambda match: _FUSED_INTO[match[1]], name) for name in names}
    rows, columns = model.tensors.block_shape
    return (
        rf"spark_inc: {len(names)} FP8 block names in {len(modules)} modules, "
        rf"block_shape=\[{rows}, {columns}\]"
    )
