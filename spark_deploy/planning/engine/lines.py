"""Patterns of what the engine and the plugin inside it print, for the proof to look for."""

from __future__ import annotations

from spark_contract.work.patterns import expand_all

from spark_deploy.catalog.model import HybridModel, Model
from spark_deploy.catalog.profile import Profile
from spark_deploy.planning.engine.options import (
    pins_drafter_experts,
    pins_target_experts,
    prefill_backend,
)

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
