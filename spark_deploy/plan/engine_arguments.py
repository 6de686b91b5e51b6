"""Arguments and environment of the engine, and the log lines that prove them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spark_contract.orders import expand_all
from spark_contract.paths import ENGINE_SOCKET, ENGINE_USER

from spark_deploy.config.catalog.model import HybridModel, Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.engine_arguments import option_values
from spark_deploy.config.settings.engine_options import canonical, meaning, structure
from spark_deploy.plan.kv_cache import context_tokens, prefill_backend
from spark_deploy.plan.memory import adapter_rank
from spark_deploy.plan.types import MemoryPlan


def pins_drafter_experts(model: Model, profile: Profile) -> bool:
    """Return whether the plan chooses the kernel of the MTP layer's experts.

    For 16-bit experts the engine's own choice depends on the GPU. INT4 experts get Marlin on every
    GPU and would lose it; an engine without a GPU has no Triton.
    """
    drafts = profile.speculation
    if drafts is None or not drafts.by_own_layers or profile.engine_mode == "portable":
        return False
    if isinstance(model, HybridModel):
        return model.architecture.mtp_scheme == "bf16"
    return _has_16_bit_experts(model)


def pins_target_experts(model: Model, profile: Profile) -> bool:
    """Return whether the plan chooses the kernel of a plain repository's 16-bit experts."""
    options = meaning(profile.options)
    chosen = "moe-backend" in options or "moe_backend" in (options.get("kernel-config") or {})
    stays_16_bit = not (quantises_online(profile) or "quantization" in options)
    return (
        isinstance(model, PlainModel)
        and _has_16_bit_experts(model)
        and profile.engine_mode != "portable"
        and not brings_own_class(profile)
        and stays_16_bit
        and not chosen
    )


def _has_16_bit_experts(model: PlainModel) -> bool:
    anatomy = model.anatomy
    return anatomy is not None and anatomy.expert_width is not None and not anatomy.quantisation


def quantises_online(profile: Profile) -> bool:
    """Return whether the engine makes weights smaller while it loads them."""
    return "quantization-config" in profile.options


def brings_own_class(profile: Profile) -> bool:
    """Return whether architectures that the engine does not list are loaded all the same."""
    return meaning(profile.options).get("model-impl") in ("transformers", "terratorch")


def stretches_context(profile: Profile) -> bool:
    """Return whether options change how positions are counted, as for longer contexts."""
    return "rope" in str(meaning(profile.options).get("hf-overrides", "")).lower()


BRING_OWN_CLASS = "set engine.options.model-impl"


# A value that begins with ``-`` would be read as an option by the engine's parser, and quoting
# cannot stop that: such values are written ``--name=value`` or refused.


MODEL_MOUNT = "/model"
CACHE_MOUNT = "/cache"
DRAFTER_MOUNT = "/drafter"
ADAPTERS_MOUNT = "/adapters"
HEAD_TIMES = f"{CACHE_MOUNT}/spark-lm-head.json"
"""What the engine measured of the opt-in head at its first start on this host."""

# Proofs ran without both. Autotuning times FlashInfer's kernels beside loaded weights; the warm-up
# compiles kernels that no request may ever need.
KERNEL_CONFIG = {"enable_flashinfer_autotune": False, "enable_jit_warmup": False}

# Of `docker run` for every release; the GPU's follow from the host. What the engine keeps of a
# container's usual rights, and why: docs/decisions/0004.
CONTAINER_ARGUMENTS = (
    "--pull=never",  # what is proven to be on the host, or nothing
    "--network=none",
    "--ipc=private",
    # One engine on one GPU shares little between its processes, and counts only what it uses.
    "--shm-size=2g",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--read-only",
    # Compilers build there and load what they built; the cache allows that as well.
    "--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777,size=4g",
    # Threads count, too: compilers start some for each core.
    "--pids-limit=8192",
)


def option_arguments(options: Mapping[str, Any]) -> list[str]:
    """Turn a mapping into arguments, in the order of the mapping.

    ``True`` is a bare flag, ``False`` its ``--no-`` form, ``None`` leaves the option out, a list
    gives several values and a mapping becomes compact JSON.
    """
    arguments: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if value is True:
            arguments.append(flag)
        elif value is False:
            arguments.append(f"--no-{flag[2:]}")
        elif isinstance(value, Mapping):
            arguments += [flag, json.dumps(value, separators=(",", ":"), sort_keys=True)]
        elif isinstance(value, (list, tuple)):
            arguments += [flag, *(_value(name, item) for item in value)]
        else:
            arguments += [flag, _value(name, value)]
    return arguments


def engine_options(model: Model, profile: Profile, memory: MemoryPlan) -> dict[str, Any]:
    """Return the options of ``vllm serve`` that follow from model, profile and memory plan."""
    portable = profile.engine_mode == "portable"
    return {
        # The watch asks every few seconds; the journal is for what clients ask.
        "disable-access-log-for-endpoints": "/health,/metrics",
        **option_values(profile.limits, profile.kv_cache),
        "max-model-len": context_tokens(model, profile),
        "gpu-memory-utilization": memory.memory_fraction,
        "kv-cache-dtype": None if profile.kv_cache.dtype == "auto" else profile.kv_cache.dtype,
        "load-format": "spark_portable" if portable else profile.load_format,
        "enable-prefix-caching": profile.prefix_caching,
        "language-model-only": None if profile.vision or not _may_see(model) else True,
        "runner": "pooling" if _pools(model) else None,
        "reasoning-parser": model.parsers.reasoning,
        "enable-auto-tool-choice": True if model.parsers.tool_call else None,
        "tool-call-parser": model.parsers.tool_call,
        "speculative-config": _drafts_told(model, profile),
        **_adapters_told(model),
        **_further_options(model, profile),
    }


def _may_see(model: Model) -> bool:
    # Dropping the towers for pictures drops those for sounds as well.
    return not isinstance(model, PlainModel) or (model.vision and not model.audio)


def _pools(model: Model) -> bool:
    return isinstance(model, PlainModel) and model.pools


def _drafts_told(model: Model, profile: Profile) -> Mapping[str, Any] | None:
    """Return the engine's speculative configuration."""
    drafts = profile.speculation
    if drafts is None:
        return None
    told: dict[str, Any] = {"method": drafts.method, "num_speculative_tokens": drafts.tokens}
    if drafts.repository:
        told["model"] = DRAFTER_MOUNT
        if profile.engine_mode == "portable":
            # That format is for trees of ours; a drafter is as it was published.
            told["draft_load_config"] = {"load_format": "safetensors"}
    if pins_drafter_experts(model, profile):
        # By itself the engine takes FlashInfer CUTLASS on a GB10, whose 85 files may first have to
        # be compiled beside the loaded weights. Proofs ran with Triton. The engine's own
        # moe-backend would reach the INT4 experts of the model as well.
        told["moe_backend"] = "triton"
    words = {"prompt_lookup_max": drafts.longest_match, "prompt_lookup_min": drafts.shortest_match}
    return {**told, **{name: count for name, count in words.items() if count is not None}}


def _adapters_told(model: Model) -> dict[str, Any]:
    """Return the options for adapters; none without."""
    if not model.adapters:
        return {}
    modules = [f"{name}={ADAPTERS_MOUNT}/{number}" for number, name in enumerate(model.adapters)]
    return {
        "enable-lora": True,
        "max-loras": len(modules),
        "max-lora-rank": adapter_rank(model),
        "lora-modules": modules,
    }


def _further_options(model: Model, profile: Profile) -> dict[str, Any]:
    """Return the profile's own options, joined with the plan's choice of kernels."""
    options = {canonical(name): value for name, value in profile.options.items()}
    if options.setdefault("kernel-config", {}) is not None:
        defaults = dict(KERNEL_CONFIG)
        if "enable-flashinfer-autotune" in meaning(options):
            del defaults["enable_flashinfer_autotune"]  # the engine refuses both spellings together
        options["kernel-config"] = {**defaults, **_mapping_of(options, "kernel-config")}
    if profile.head == "int8-triton":
        own = _mapping_of(options, "additional-config")
        spark = {"lm_head": profile.head, "lm_head_times": HEAD_TIMES, **own.get("spark", {})}
        options["additional-config"] = {**own, "spark": spark}
    if pins_target_experts(model, profile):
        # Every expert is 16-bit: what holds for the drafter holds for the whole engine.
        options["moe-backend"] = "triton"
    return options


def _mapping_of(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the mapping that an option holds, for the plan to add its own keys."""
    own = structure(options.get(name) or {})
    if not isinstance(own, Mapping):
        what = f"{own!r} is not a mapping, and the plan adds keys to it"
        raise PlanError.one(f"engine option {name}", what, "write it as a mapping")
    return own


def engine_arguments(
    model: Model, profile: Profile, memory: MemoryPlan, names: Sequence[str]
) -> tuple[str, ...]:
    """Return everything after ``vllm serve``."""
    served = [_value("served-model-name", name) for name in names]
    options = option_arguments(engine_options(model, profile, memory))
    return (MODEL_MOUNT, "--served-model-name", *served, *options, "--uds", ENGINE_SOCKET)


def engine_environment(
    profile: Profile, *, plugin: bool, start_timeout_s: int, image: str
) -> dict[str, str]:
    """Return the environment of the engine; it holds no secret.

    The container has a loopback and no network, so every library that looks for an interface is
    told to use that one.
    """
    environment = {
        # Its account has neither a home nor a name in the image; libraries ask for both.
        "HOME": CACHE_MOUNT,
        "USER": ENGINE_USER,
        "XDG_CACHE_HOME": CACHE_MOUNT,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Skips its warm-up: it is not used for this architecture, and lists of that change.
        "VLLM_USE_DEEP_GEMM": "0",
        # top_k and top_p by Triton as in the proofs; FlashInfer would compile its own kernels.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # A full-width compilation beside loaded weights freezes the host.
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
    if plugin:
        environment["VLLM_PLUGINS"] = "spark"
    if profile.head == "int8-triton":
        # What it measures holds for this image only, and it cannot ask which one it runs in.
        environment["SPARK_IMAGE"] = image
    return {**environment, **profile.environment}


def rank_arguments(rank: int, addresses: Sequence[str], port: int) -> tuple[str, ...]:
    """Return what one host of a cluster is told beside: its place among the addresses of all."""
    count = str(len(addresses))
    argv = ["--tensor-parallel-size", count, "--nnodes", count, "--node-rank", str(rank)]
    argv += ["--master-addr", addresses[0], "--master-port", str(port)]
    return (*argv, "--headless") if rank else tuple(argv)


def rank_environment(address: str) -> dict[str, str]:
    """Return the variable that tells the engine of one host its own address."""
    return {"VLLM_HOST_IP": address}


def _value(name: str, value: Any) -> str:
    text = str(value)
    if text.startswith("-"):
        what = f"value {text!r} begins with '-' and would be read as an option"
        raise PlanError.one(f"engine option {name}", what, "write it as a mapping or drop it")
    return text


PREFILL_LINES = {
    "triton": r"Using Triton/FLA GDN prefill kernel \(requested=triton\b",
    "flashinfer": r"Using FlashInfer GDN prefill kernel \(requested=flashinfer\b",
}
TRITON_EXPERTS_LINE = r"Using TRITON Unquantized MoE (LoRA )?backend"
# Before 2.29.3 ranks on this CPU are reported to wait for each other for ever after some minutes.
WEDGING_LINE = r"is using nccl==2\.(\d|1\d|2[0-8])\.|is using nccl==2\.29\.[0-2]\b"
_FINITE_LINE = r"spark: all numbers of \d+ tensors and the logits of \d+ heads of \w+ are finite"
_PORTABLE_LINE = r"spark portable mode: dequantised \d+ tensors to bfloat16"


def lines_of(
    model: Model, profile: Profile, *, plugin: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the lines that have to be in the log, and those that must not."""
    required = list(profile.check.log_required)
    forbidden = list(profile.check.log_forbidden)
    if plugin and isinstance(model, HybridModel) and profile.shared_experts.startswith("fp8"):
        required.append(plugin_line(model))
    if plugin and profile.tree_needs_plugin:
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
    """Return the pattern of the line in which the engine names the prefill kernel it was told."""
    line = PREFILL_LINES.get(prefill_backend(profile))
    nets = isinstance(model, HybridModel) and model.architecture.linear_layers > 0
    return [line] if line and nets else []


def plugin_line(model: HybridModel) -> str:
    """Return the pattern of the line in which the plugin states the exact sets it found."""
    names = expand_all(model.tensors.swap)
    modules = {name.replace(".gate_proj", ".gate_up_proj") for name in names}
    modules -= {name for name in modules if name.endswith(".up_proj")}
    rows, columns = model.tensors.block_shape
    return (
        rf"spark_inc: {len(names)} FP8 block names in {len(modules)} modules, "
        rf"block_shape=\[{rows}, {columns}\]"
    )
