"""Sources, checkpoints and images that a model and a profile need on a host."""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from typing import Any

from spark_contract.documents import plain
from spark_contract.fetching import LayersPlan, parse_reference
from spark_contract.orders import (
    RECIPE_VERSION,
    Base,
    BuildPlan,
    DonorShape,
    DonorUrl,
    RequantizePlan,
)
from spark_contract.paths import GPU_RECEIPT, QUANTISER
from spark_contract.units import IMAGE_NAME

from spark_deploy.config.catalog.model import Architecture, HybridModel, Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.documents.digest import digest_of
from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.types import Settings
from spark_deploy.lock.left_out import why_left_out
from spark_deploy.lock.types import Lock, LockedImage, LockedSource
from spark_deploy.plan.engine_arguments import ADAPTERS_MOUNT, DRAFTER_MOUNT
from spark_deploy.plan.jobs import fetch_order
from spark_deploy.plan.memory import weights_of
from spark_deploy.plan.types import (
    BesidePlan,
    CheckpointPlan,
    ImagePlan,
    PayloadIdentity,
    RequantizedPlan,
    SourcePlan,
)


def locked_source(lock: Lock, repo: str, revision: str) -> LockedSource:
    """Return the locked commit of ``repo``; a plan cannot be made without it."""
    found = lock.source(repo, revision)
    if found is None:
        fix = "run `spark-deploy update --missing`, or set locked: first-use"
        raise PlanError.one(f"lock: {repo}", f"revision {revision} is not locked", fix)
    for file in found.files:
        if why := why_left_out(file.path):
            what = f"{file.path} is not fetched any more: {why}"
            fix = f"run `spark-deploy update --only {repo}`; the tree is fetched anew without it"
            raise PlanError.one(f"lock: {repo}", what, fix)
    return found


def served_source(model: Model, lock: Lock) -> LockedSource:
    """Return the repository that is served as it is, without the files that nobody reads."""
    if not isinstance(model, PlainModel):
        return locked_source(lock, model.sources.base, model.sources.revision)
    found = locked_source(lock, model.repository, model.revision)
    kept = tuple(
        file
        for file in found.files
        if not any(fnmatch.fnmatchcase(file.path, pattern) for pattern in model.leave_out)
    )
    return replace(found, files=kept)


def source_plan(source: LockedSource, settings: Settings) -> SourcePlan:
    """Return the plan to fetch one repository whole."""
    folder = f"{source.repo.replace('/', '--')}-{source.commit[:12]}"
    if source.left_out:
        # A tree of an earlier lock with those files is another one.
        folder += f"-{source.digest[:12]}"
    where = f"{settings.paths.sources_dir}/{folder}"
    return SourcePlan(source, where, settings.hub, settings.downloads)


def refuse_impossible_trees(model: Model, profile: Profile, settings: Settings) -> None:
    """Raise one error for a tree that cannot be built, or not kept as the settings wish."""
    where = f"profile {profile.name}"
    if isinstance(model, PlainModel) and (profile.builds_checkpoint or profile.plugin):
        what = f"is for trees of our own; {model.name} is served as it was published"
        raise PlanError.one(where, what, "choose profile plain, or one of your own like it")
    if settings.checkpoint.prebuilt:
        _refuse_no_hybrid(model, profile)
    if settings.checkpoint.requantized:
        _refuse_other_bases(where, settings)
    if not settings.checkpoint.keep_base:
        if not profile.builds_checkpoint:
            what = "keep_base: false would remove the very tree it serves: it builds none"
            fix = "set checkpoint.keep_base: true, or choose a profile that builds a tree"
            raise PlanError.one(f"{where}: checkpoint.keep_base", what, fix)
        if profile.layout == "overlay":
            what = "keep_base: false is for layout full: an overlay is links to its base"
            fix = "set checkpoint.layout: full beside it, or checkpoint.keep_base: true"
            raise PlanError.one(f"{where}: checkpoint.keep_base", what, fix)
    if profile.shared_experts == "int8-g128" and profile.layout == "overlay":
        what = "shared_experts int8-g128 cannot be an overlay: their names would be there twice"
        raise PlanError.one(f"{where}: checkpoint.layout", what, "set checkpoint.layout: full")


def _refuse_other_bases(where: str, settings: Settings) -> None:
    """Refuse settings that say of a tree of our own what is true of downloaded ones alone."""
    if settings.checkpoint.prebuilt:
        what = "prebuilt and requantized are two bases"
        raise PlanError.one(f"{where}: checkpoint.prebuilt", what, "set one of them to false")
    if not settings.checkpoint.keep_base:
        what = "keep_base: false is for bases that can be downloaded again"
        raise PlanError.one(f"{where}: checkpoint.keep_base", what, "set it to true")


def _refuse_no_hybrid(model: Model, profile: Profile) -> None:
    where = f"model {model.name} with profile {profile.name}: checkpoint.prebuilt"
    without = "set checkpoint.prebuilt: false"
    if isinstance(model, PlainModel) or model.sources.hybrid is None:
        what = "this model names no prebuilt hybrid"
        raise PlanError.one(where, what, f"name one in its sources.hybrid, or {without}")
    if profile.shared_experts != "fp8-base":
        what = f"a hybrid holds shared experts in FP8, this profile wants {profile.shared_experts}"
        raise PlanError.one(where, what, without)
    if profile.layout == "overlay":
        what = "a hybrid holds them under their plain names, which an overlay drops"
        raise PlanError.one(where, what, f"set checkpoint.layout: full beside it, or {without}")


def checkpoint_plan(
    model: Model,
    profile: Profile,
    settings: Settings,
    lock: Lock,
    requantized: RequantizedPlan | None = None,
) -> CheckpointPlan | None:
    """Return the plan of the tree to build; ``None`` when the base is served as it is."""
    if not profile.builds_checkpoint or isinstance(model, PlainModel):
        return None
    base = requantized or _fetched_base(model, settings, lock)
    donor = _donor(model, profile, lock)
    return CheckpointPlan(
        order=_order(model, profile, settings, base, donor),
        base=base,
        donor=donor,
        output_bytes=output_bytes(model, profile, base.size_bytes),
        donor_bytes=weights_of(model.architecture).shared_fp8_bytes if donor else 0,
        keep_base=settings.checkpoint.keep_base,
    )


def _fetched_base(model: HybridModel, settings: Settings, lock: Lock) -> SourcePlan:
    repo = (settings.checkpoint.prebuilt and model.sources.hybrid) or model.sources.base
    return source_plan(locked_source(lock, repo, model.sources.revision), settings)


def _order(
    model: HybridModel,
    profile: Profile,
    settings: Settings,
    base: SourcePlan | RequantizedPlan,
    donor: LockedSource | None,
) -> BuildPlan:
    """Return what the builder is told; its digest and folder are made from all the rest.

    The name carries no profile: profiles that want the same tree share one.
    """
    hub, downloads = settings.hub, settings.downloads
    order = BuildPlan(
        digest="0" * 64,
        recipe_version=RECIPE_VERSION,
        name=model.name,
        base=Base(base.dir, base.revision),
        donor=DonorUrl(
            url=f"{hub.endpoint}/{donor.repo}/resolve/{donor.commit}",
            tries=downloads.tries,
            backoff_s=downloads.retry_pause_s,
            outage_s=downloads.outage_s,
        )
        if donor
        else None,
        **exact_sets(model),
        shared_experts=profile.shared_experts,
        head=profile.checkpoint_head,
        layout=profile.layout,
        out=f"{settings.paths.models_dir}/{model.name}",
        extra={},
    )
    named = ("digest", "base", "donor", "out")
    digest = digest_of(
        {
            "base": base.digest,
            "donor": donor and {"repo": donor.repo, "commit": donor.commit},
            "builder": {key: said for key, said in plain(order).items() if key not in named},
        }
    )
    return replace(order, digest=digest, out=f"{order.out}-{digest[:12]}")


def exact_sets(model: HybridModel) -> dict[str, Any]:
    """Return what an order says of a model's names and shapes."""
    tensors = model.tensors
    return {
        "swap": tensors.swap,
        "block_shape": tensors.block_shape,
        "base_tensors": tensors.base,
        "donor_unmatched": tensors.donor_unmatched,
        "donor_shapes": tuple(
            DonorShape(part.modules, part.weight, part.scale) for part in tensors.donor_shapes
        ),
        "mtp_tensors": tensors.mtp,
    }


def output_bytes(model: HybridModel, profile: Profile, base_bytes: int) -> int:
    """Return the new bytes the builder writes: replaced tensors, or the whole tree."""
    sizes = weights_of(model.architecture)
    new = old = 0
    if profile.shared_experts not in ("keep", "fp8-base"):
        new = sizes.shared_fp8_bytes
        if profile.shared_experts == "int8-g128":
            new = sizes.shared_int8_bytes
        old = sizes.shared_bytes
    if profile.head == "int8-g128":
        new, old = new + sizes.head_int8_bytes, old + sizes.head_bytes
    return new if profile.layout == "overlay" else base_bytes - old + new


def _donor(model: HybridModel, profile: Profile, lock: Lock) -> LockedSource | None:
    if profile.shared_experts not in ("fp8-donor", "fp8-base"):
        return None
    if model.sources.donor is None:
        what = f"profile {profile.name} takes shared experts from an FP8 donor; this model has none"
        fix = "name one in its sources.donor, or choose a profile with another shared_experts"
        raise PlanError.one(f"catalog/models/{model.name}.yml", what, fix)
    return locked_source(lock, model.sources.donor, model.sources.revision)


# Of one block while it is tuned: the weight, its rounded form, the values that are tuned, their
# gradients and the best of them so far, most in 32 bits. An estimate: no Spark has measured it.
_BYTES_PER_PARAMETER = 32
_RUNTIME_BYTES = 8 << 30
# 16 bits over 4 bits, with a 16-bit scale and a 4-bit zero for each 128 of them.
_OF_INT4 = 2 / (0.5 + 2 / 128 + 0.5 / 128)
_CALIBRATION = "/calibration.jsonl"  # until there is a job, in whose folder it lies


def requantized_plan(
    model: Model, settings: Settings, lock: Lock, image: ImagePlan, quantiser_digest: str
) -> RequantizedPlan | None:
    """Return the plan of the tree to quantise; ``None`` where the published one is wanted.

    Args:
        model: says by its exact sets of names what is packed and what stays in 16 bits.
        settings: of the host.
        lock: has the commit of the 16-bit repository.
        image: the engine's, in which AutoRound runs.
        quantiser_digest: of the list of pinned packages that AutoRound consists of.
    """
    if not settings.checkpoint.requantized:
        return None
    wanted = settings.requantize
    model, repository = _with_original(model)
    if wanted.iters and wanted.calibration is None:
        fix = "name a file in requantize.calibration, or set requantize.iters: 0"
        raise PlanError.one("requantize.calibration", "names no text to tune with", fix)
    original = source_plan(locked_source(lock, repository, model.sources.revision), settings)
    activations = wanted.nsamples * wanted.seqlen * model.architecture.hidden * 2
    size_bytes = weights_of(model.architecture).tree_bytes
    order = RequantizePlan(
        digest="0" * 64,
        name=model.name,
        original=fetch_order(original),
        base_tensors=model.tensors.base,
        mtp_tensors=model.tensors.mtp,
        layers=model.architecture.layers,
        image=image.tag,
        packages=QUANTISER,
        calibration=_CALIBRATION,
        gpu=GPU_RECEIPT,
        iters=wanted.iters,
        nsamples=wanted.nsamples,
        seqlen=wanted.seqlen,
        batch=wanted.batch,
        memory_bytes=_memory_bytes(model.architecture, activations),
        # The tree is linked into its place; beside it lies what the next block begins with.
        work_bytes=size_bytes + 2 * activations,
        out=f"{settings.paths.models_dir}/{model.name}-int4",
    )
    named = ("base_tensors", "mtp_tensors", "iters", "nsamples", "seqlen", "batch")
    digest = digest_of(
        {
            "original": original.digest,
            "image": image.base,
            "quantiser": quantiser_digest,
            "calibration": digest_of(wanted.calibration),
            "order": {key: said for key, said in plain(order).items() if key in named},
        }
    )
    order = replace(order, digest=digest, out=f"{order.out}-{digest[:12]}")
    return RequantizedPlan(order, original, wanted.calibration or "", size_bytes)


def original_bytes(model: Architecture) -> int:
    """Return the bytes of ``model`` as it is published in 16 bits, where nobody read its files."""
    weights = weights_of(replace(model, mtp_scheme="bf16"))
    packed = weights.experts_bytes + weights.attention_bytes
    return weights.tree_bytes - packed + round(packed * _OF_INT4)


def _with_original(model: Model) -> tuple[HybridModel, str]:
    if isinstance(model, HybridModel) and model.sources.original is not None:
        return model, model.sources.original
    raise PlanError.one(
        f"model {model.name}: checkpoint.requantized",
        "this model names no 16-bit repository",
        "name one in its sources.original, or set checkpoint.requantized: false",
    )


def _memory_bytes(model: Architecture, activations: int) -> int:
    """Return what one block takes while it is tuned, with the activations before and after it."""
    block = 3 * model.hidden * (model.experts * model.expert_width + model.shared_expert_width)
    return block * _BYTES_PER_PARAMETER + 4 * activations + _RUNTIME_BYTES


def image_plan(
    model: Model, profile: Profile, settings: Settings, lock: Lock, payload: PayloadIdentity
) -> ImagePlan:
    """Return the plan of the engine image."""
    base = locked_image(model, settings, lock, model.image.role)
    plugin = profile.plugin and model.image.plugin
    # Without our layer its content must not change the identity.
    context_digest = payload.image_context_digest if plugin else ""
    digest = digest_of({"base": base.pinned, "context": context_digest, "plugin": plugin})
    return ImagePlan(
        base=base.pinned,
        tag=f"{IMAGE_NAME}:{digest[:12]}" if plugin else base.pinned,
        digest=digest,
        context_digest=context_digest,
        plugin=plugin,
        size_bytes=base.size_bytes,
        layers=_layers(base.pinned, settings),
    )


def _layers(base: str, settings: Settings) -> LayersPlan:
    """Return the order for the base's blobs; patient like a download, with plain docker behind."""
    reference = parse_reference(base)
    digest = digest_of({"layers": base})
    downloads = settings.downloads
    folder = f"image--{reference.name.replace('/', '--')}-{digest[:12]}"
    return LayersPlan(
        digest=digest,
        reference=base,
        plain=reference.host in settings.registries.insecure,
        out=f"{settings.paths.sources_dir}/{folder}",
        parallel=downloads.parallel,
        rate_limit_bytes_per_s=downloads.rate_limit_bytes_per_s,
        tries=downloads.tries,
        backoff_s=downloads.retry_pause_s,
        outage_s=downloads.outage_s,
    )


def locked_image(model: Model, settings: Settings, lock: Lock, role: str) -> LockedImage:
    """Return the locked image of a role of the settings."""
    reference = settings.images.get(role)
    if reference is None:
        what = f"needs the image role '{role}', which the settings do not have"
        fix = f"set images.{role} (known: {', '.join(sorted(settings.images))})"
        raise PlanError.one(f"catalog/models/{model.name}.yml: image.role", what, fix)
    found = lock.images.get(reference)
    if found is None:
        fix = "run `spark-deploy update --missing`, or set locked: first-use"
        raise PlanError.one(f"lock: {reference}", "is not locked to a digest", fix)
    return found


def beside_plans(
    model: Model, profile: Profile, settings: Settings, lock: Lock
) -> tuple[BesidePlan, ...]:
    """Return the repositories that are mounted beside the tree, the drafter's first."""
    drafts = profile.speculation
    wanted = [
        (f"{ADAPTERS_MOUNT}/{number}", one.repository, one.revision)
        for number, one in enumerate(model.adapters.values())
    ]
    if drafts and drafts.repository:
        wanted.insert(0, (DRAFTER_MOUNT, drafts.repository, drafts.revision))
    return tuple(
        BesidePlan(source_plan(locked_source(lock, repository, revision), settings), target)
        for target, repository, revision in wanted
    )
