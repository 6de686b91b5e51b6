"""Sources, checkpoints and images that a model and a profile need on a host."""

import fnmatch
import re
from dataclasses import replace
from typing import Any

from spark_contract import builder_api
from spark_contract.documents import to_plain
from spark_contract.fetching import LayersPlan, parse_reference
from spark_contract.paths import GPU_RECEIPT, QUANTIZER
from spark_contract.units import IMAGE_NAME

from spark_deploy.config.catalog.architecture import Architecture
from spark_deploy.config.catalog.model import HybridModel, Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.documents import digest_of
from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.types import Settings
from spark_deploy.lock.types import (
    Lock,
    LockedImage,
    LockedSource,
    names_to_verify,
    why_not_downloaded,
)
from spark_deploy.plan import types
from spark_deploy.plan.engine_arguments import ADAPTERS_MOUNT, DRAFTER_MOUNT
from spark_deploy.plan.jobs import fetch_plan
from spark_deploy.plan.memory import (
    attention_bytes,
    ngram_file_bytes,
    served_architecture,
    weight_sizes,
)
from spark_deploy.plan.types import (
    CheckpointPlan,
    CompanionPlan,
    ImagePlan,
    RequantizedPlan,
    SourcePlan,
)

# As in the INT4 drafter of the 35B's base.
_INT4_WEIGHTS = re.compile(r"mtp\.layers\..+\.(mlp\.experts|self_attn)\..+_proj\.weight")
_CALIBRATION = "/calibration.jsonl"  # placeholder; the job sets the real path
# While a block is tuned: weights, rounded weights, tuned values, gradients and best values so far,
# most in 32 bits. Estimated; not measured on a Spark.
_BYTES_PER_PARAMETER = 32
_RUNTIME_BYTES = 8 << 30
# 16 bits over 4 bits, with a 16-bit scale and a 4-bit zero per group of 128.
_INT4_RATIO = 2 / (0.5 + 2 / 128 + 0.5 / 128)


def locked_source(lock: Lock, repo: str, revision: str) -> LockedSource:
    source = lock.source(repo, revision)
    if source is None:
        fix = "run `spark-deploy update --missing`, or set locked: first-use"
        raise PlanError.single(f"lock: {repo}", f"revision {revision} is not locked", fix)
    for file in source.files:
        if reason := why_not_downloaded(file.path):
            message = f"{file.path} is excluded from downloads: {reason}"
            fix = f"run `spark-deploy update --only {repo}` to lock the repository without it"
            raise PlanError.single(f"lock: {repo}", message, fix)
    return source


def served_source(model: Model, lock: Lock) -> LockedSource:
    """Return the repository to serve unchanged, without the files that ``leave_out`` matches."""
    if not isinstance(model, PlainModel):
        return locked_source(lock, model.sources.base, model.sources.revision)
    source = locked_source(lock, model.repository, model.revision)
    kept = tuple(
        file
        for file in source.files
        if not any(fnmatch.fnmatchcase(file.path, pattern) for pattern in model.leave_out)
    )
    return replace(source, files=kept)


def source_plan(source: LockedSource, settings: Settings) -> SourcePlan:
    folder = f"{source.repo.replace('/', '--')}-{source.commit[:12]}"
    if source.left_out:
        # A partial download has different contents, so it gets its own folder.
        folder += f"-{source.digest[:12]}"
    path = f"{settings.paths.sources_dir}/{folder}"
    return SourcePlan(source, path, settings.hub, settings.downloads)


def reject_unbuildable_checkpoint(model: Model, profile: Profile, settings: Settings) -> None:
    """Raise PlanError if the checkpoint cannot be built, or cannot be stored as configured."""
    where, checkpoint = f"profile {profile.name}", settings.checkpoint
    if isinstance(model, PlainModel) and (profile.builds_checkpoint or profile.plugin):
        message = f"builds a checkpoint or uses the plugin, but {model.name} is served as published"
        raise PlanError.single(where, message, "use profile plain, or a similar profile")
    if checkpoint.source == "prebuilt":
        _reject_unusable_hybrid(model, profile)
    if not checkpoint.keep_base:
        _reject_discarded_base(profile, settings)
    if (
        isinstance(model, HybridModel)
        and profile.drafter != "keep"
        and model.architecture.mtp_scheme == "bf16"
        and not _int4_modules(model, profile)
    ):
        message = "tensors.mtp in the model file lists no 16-bit tensors to round to INT4"
        raise PlanError.single(f"{where}: drafter", message, "set engine.drafter: keep")
    if profile.shared_experts == "int8-g128" and profile.layout == "overlay":
        message = "an overlay with int8-g128 would contain the names of the shared experts twice"
        fix = "set checkpoint.layout: full"
        raise PlanError.single(f"{where}: checkpoint.layout", message, fix)


def _reject_discarded_base(profile: Profile, settings: Settings) -> None:
    if settings.checkpoint.source == "requantized":
        message = "keep_base: false requires a base that can be downloaded again"
        fix = "set checkpoint.keep_base: true"
    elif not profile.builds_checkpoint:
        message = "keep_base: false would remove the checkpoint that this profile serves"
        fix = "set checkpoint.keep_base: true, or use a profile that builds a checkpoint"
    elif profile.layout == "overlay":
        message = "keep_base: false requires layout full, because an overlay links to its base"
        fix = "set checkpoint.layout: full, or checkpoint.keep_base: true"
    else:
        return
    raise PlanError.single(f"profile {profile.name}: checkpoint.keep_base", message, fix)


def _reject_unusable_hybrid(model: Model, profile: Profile) -> None:
    fix = "set checkpoint.source: base"
    if isinstance(model, PlainModel) or model.sources.hybrid is None:
        message = "no prebuilt hybrid checkpoint is known for this model"
        fix = f"set sources.hybrid in the model file, or {fix}"
    elif profile.shared_experts != "fp8-base":
        message = f"prebuilt shared experts are FP8, but the profile needs {profile.shared_experts}"
    elif profile.layout == "overlay":
        message = "an overlay would remove the shared experts of a prebuilt hybrid checkpoint"
        fix = f"set checkpoint.layout: full, or {fix}"
    else:
        return
    where = f"model {model.name} with profile {profile.name}: checkpoint.source"
    raise PlanError.single(where, message, fix)


def checkpoint_plan(
    model: Model,
    profile: Profile,
    settings: Settings,
    lock: Lock,
    requantized: RequantizedPlan | None = None,
) -> CheckpointPlan | None:
    """Return the plan for building a checkpoint; ``None`` if the base is served unchanged."""
    if not profile.builds_checkpoint or isinstance(model, PlainModel):
        return None
    sources, repo = model.sources, model.sources.base
    if settings.checkpoint.source == "prebuilt" and sources.hybrid:
        repo = sources.hybrid
    base = requantized or source_plan(locked_source(lock, repo, sources.revision), settings)
    donor = None
    if profile.shared_experts in builder_api.WITH_DONOR:
        if sources.donor is None:
            message = f"profile {profile.name} needs an FP8 source checkpoint; this model has none"
            fix = "set sources.donor, or use a profile with a different shared_experts value"
            raise PlanError.single(f"catalog/models/{model.name}.yml", message, fix)
        donor = locked_source(lock, sources.donor, sources.revision)
    build = _build_plan(model, profile, settings, base, donor)
    if isinstance(build.donor, builder_api.DonorUrl) and isinstance(base, SourcePlan):
        # The digest cannot include this hash, which is known only after the first build.
        sha256 = lock.donor_sha256(names_to_verify(build, base.locked, donor))
        build = replace(build, donor=replace(build.donor, sha256=sha256))
    return CheckpointPlan(
        build=build,
        base=base,
        donor=donor,
        output_bytes=_output_bytes(model, profile, base.size_bytes),
        donor_bytes=weight_sizes(model.architecture).shared_fp8_bytes if donor else 0,
        keep_base=settings.checkpoint.keep_base,
    )


def _build_plan(
    model: HybridModel,
    profile: Profile,
    settings: Settings,
    base: SourcePlan | RequantizedPlan,
    donor: LockedSource | None,
) -> builder_api.BuildPlan:
    """Return the build plan. Its digest and folder do not depend on the profile's name."""
    hub, downloads = settings.hub, settings.downloads
    build = builder_api.BuildPlan(
        digest="0" * 64,
        recipe_version=builder_api.RECIPE_VERSION,
        name=model.name,
        base=builder_api.Base(
            base.dir, base.locked.commit if isinstance(base, SourcePlan) else base.digest
        ),
        donor=builder_api.DonorUrl(
            url=f"{hub.endpoint}/{donor.repo}/resolve/{donor.commit}",
            tries=downloads.tries,
            outage_s=downloads.outage_s,
        )
        if donor
        else None,
        **tensor_fields(model),
        shared_experts=profile.shared_experts,
        head=profile.checkpoint_head,
        drafter_int4=_int4_modules(model, profile),
        ngram_table=profile.ngram_format,
        layout=profile.layout,
        out=f"{settings.paths.models_dir}/{model.name}",
        extra={},
    )
    excluded = ("digest", "base", "donor", "out")
    digest = digest_of(
        {
            "base": base.digest,
            "donor": donor and {"repo": donor.repo, "commit": donor.commit},
            "builder": {k: value for k, value in to_plain(build).items() if k not in excluded},
        }
    )
    return replace(build, digest=digest, out=f"{build.out}-{digest[:12]}")


def _int4_modules(model: HybridModel, profile: Profile) -> tuple[str, ...]:
    """Return the MTP modules to round to INT4; none if the base already stores them as INT4."""
    if profile.drafter == "keep" or model.architecture.mtp_scheme == "int4":
        return ()
    weights = [name for name in model.tensors.mtp if _INT4_WEIGHTS.fullmatch(name)]
    return tuple(name.removesuffix(".weight") for name in weights)


def tensor_fields(model: HybridModel) -> dict[str, Any]:
    """Return the tensor names and shapes for a build plan."""
    tensors = model.tensors
    return {
        "swap": tensors.swap,
        "block_shape": tensors.block_shape,
        "base_tensors": tensors.base,
        "donor_unmatched": tensors.donor_unmatched,
        "donor_shapes": tuple(
            builder_api.DonorShape(shape.modules, shape.weight, shape.scale)
            for shape in tensors.donor_shapes
        ),
        "mtp_tensors": tensors.mtp,
    }


def _output_bytes(model: HybridModel, profile: Profile, base_bytes: int) -> int:
    """Return the size of a built checkpoint; an overlay contains only the new tensors."""
    sizes = weight_sizes(model.architecture)
    new = old = 0
    if profile.shared_experts not in ("keep", "fp8-base"):
        int8 = profile.shared_experts == "int8-g128"
        new = sizes.shared_int8_bytes if int8 else sizes.shared_fp8_bytes
        old = sizes.shared_bytes
    if (attention := attention_bytes(model.architecture, profile)) != sizes.attention_bytes:
        new, old = new + attention, old + sizes.attention_bytes
    if ngram := ngram_file_bytes(model.architecture, profile):
        new, old = new + ngram, old + sizes.ngram_bytes
    if profile.head == "int8-g128":
        new, old = new + sizes.head_int8_bytes, old + sizes.head_bytes
    if _int4_modules(model, profile):
        served = served_architecture(model.architecture, profile)
        new, old = new + weight_sizes(served).mtp_bytes, old + sizes.mtp_bytes
    return new if profile.layout == "overlay" else base_bytes - old + new


def requantized_plan(
    model: Model, settings: Settings, lock: Lock, image: ImagePlan, quantizer_digest: str
) -> RequantizedPlan | None:
    """Return the plan for quantizing a checkpoint; ``None`` if not configured.

    AutoRound runs in the engine's image. The model's exact tensor sets decide which tensors it
    packs; the rest stays in 16 bits.
    """
    if settings.checkpoint.source != "requantized":
        return None
    options = settings.requantize
    if not isinstance(model, HybridModel) or model.sources.original is None:
        where = f"model {model.name}: checkpoint.source"
        fix = "set sources.original in the model file, or checkpoint.source: base"
        raise PlanError.single(where, "this model has no 16-bit repository", fix)
    if options.iters and options.calibration is None:
        fix = "set requantize.calibration to a file, or requantize.iters: 0"
        raise PlanError.single("requantize.calibration", "tuning requires calibration text", fix)
    revision = model.sources.revision
    original = source_plan(locked_source(lock, model.sources.original, revision), settings)
    shape = model.architecture
    activation_bytes = options.nsamples * options.seqlen * shape.hidden * 2
    parameters = 3 * shape.hidden * (shape.experts * shape.expert_width + shape.shared_expert_width)
    size_bytes = weight_sizes(shape).tree_bytes
    build = builder_api.RequantizePlan(
        digest="0" * 64,
        name=model.name,
        original=fetch_plan(original),
        base_tensors=model.tensors.base,
        mtp_tensors=model.tensors.mtp,
        layers=shape.layers,
        image=image.tag,
        packages=QUANTIZER,
        calibration=_CALIBRATION,
        gpu=GPU_RECEIPT,
        iters=options.iters,
        nsamples=options.nsamples,
        seqlen=options.seqlen,
        batch=options.batch,
        # The tuned block, and the inputs and outputs of a block.
        memory_bytes=parameters * _BYTES_PER_PARAMETER + 4 * activation_bytes + _RUNTIME_BYTES,
        # The result, and the inputs of the next block.
        work_bytes=size_bytes + 2 * activation_bytes,
        out=f"{settings.paths.models_dir}/{model.name}-int4",
    )
    included = ("base_tensors", "mtp_tensors", "iters", "nsamples", "seqlen", "batch")
    digest = digest_of(
        {
            "original": original.digest,
            "image": image.base,
            "quantizer": quantizer_digest,
            "calibration": digest_of(options.calibration),
            "order": {key: value for key, value in to_plain(build).items() if key in included},
        }
    )
    build = replace(build, digest=digest, out=f"{build.out}-{digest[:12]}")
    return RequantizedPlan(build, original, options.calibration or "", size_bytes)


def original_bytes(model: Architecture) -> int:
    weights = weight_sizes(replace(model, mtp_scheme="bf16"))
    packed = weights.experts_bytes + weights.attention_bytes
    return weights.tree_bytes - packed + round(packed * _INT4_RATIO)


def image_plan(
    model: Model, profile: Profile, settings: Settings, lock: Lock, payload: types.PayloadIdentity
) -> ImagePlan:
    locked = locked_image(model, settings, lock, model.image.role)
    base = locked.pinned
    plugin = profile.plugin and model.image.plugin
    downloads = settings.downloads
    # The plugin's content is part of the identity only if it is used.
    context_digest = payload.image_context_digest if plugin else ""
    digest = digest_of({"base": base, "context": context_digest, "plugin": plugin})
    layers_digest, reference = digest_of({"layers": base}), parse_reference(base)
    folder = f"image--{reference.name.replace('/', '--')}-{layers_digest[:12]}"
    return ImagePlan(
        base=base,
        tag=f"{IMAGE_NAME}:{digest[:12]}" if plugin else base,
        digest=digest,
        context_digest=context_digest,
        plugin=plugin,
        size_bytes=locked.size_bytes,
        layers=LayersPlan(
            digest=layers_digest,
            reference=base,
            plain=reference.host in settings.registries.insecure,
            out=f"{settings.paths.sources_dir}/{folder}",
            rate_limit_bytes_per_s=downloads.rate_limit_bytes_per_s,
            tries=downloads.tries,
            outage_s=downloads.outage_s,
        ),
    )


def locked_image(model: Model, settings: Settings, lock: Lock, role: str) -> LockedImage:
    reference = settings.images.get(role)
    if reference is None:
        message = f"the model needs image role '{role}', which is missing from the settings"
        fix = f"set images.{role} (known: {', '.join(sorted(settings.images))})"
        raise PlanError.single(f"catalog/models/{model.name}.yml: image.role", message, fix)
    image = lock.images.get(reference)
    if image is None:
        fix = "run `spark-deploy update --missing`, or set locked: first-use"
        raise PlanError.single(f"lock: {reference}", "the image is not locked to a digest", fix)
    return image


def companion_plans(
    model: Model, profile: Profile, settings: Settings, lock: Lock
) -> tuple[CompanionPlan, ...]:
    drafts = profile.speculation
    companions = [
        (f"{ADAPTERS_MOUNT}/{number}", adapter.repository, adapter.revision)
        for number, adapter in enumerate(model.adapters.values())
    ]
    if drafts and drafts.repository:
        companions.insert(0, (DRAFTER_MOUNT, drafts.repository, drafts.revision))
    return tuple(
        CompanionPlan(source_plan(locked_source(lock, repository, revision), settings), target)
        for target, repository, revision in companions
    )
