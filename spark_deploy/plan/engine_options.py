"""What options of the engine mean for the plan, where no key of the catalog says it."""

from __future__ import annotations

from spark_deploy.config.catalog.model import HybridModel, Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.settings.engine.options import meaning, whole


def block_tokens(profile: Profile) -> int | None:
    """Return how many tokens a block of the KV cache was told to hold."""
    return whole(meaning(profile.options).get("block-size"))


def prefill_backend(profile: Profile) -> str:
    """Return the name of the kernel that was chosen for gated delta nets."""
    return str(meaning(profile.options).get("gdn-prefill-backend"))


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
