"""Which trees a host needs, and the plan of the tree we build from them."""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from typing import Any

from spark_contract.documents import plain
from spark_contract.work.orders import RECIPE_VERSION, Base, BuildPlan, DonorShape, DonorUrl

from spark_deploy.catalog.model import HybridModel, Model, PlainModel
from spark_deploy.catalog.profile import Profile
from spark_deploy.documents.digest import digest_of
from spark_deploy.errors import PlanError
from spark_deploy.lockfile.left_out import why_left_out
from spark_deploy.lockfile.types import Lock, LockedSource
from spark_deploy.planning.budget.weights import weights_of
from spark_deploy.planning.types import CheckpointPlan, RequantizedPlan, SourcePlan
from spark_deploy.settings.types import Settings


def locked_source(lock: Lock, repo: str, revision: str) -> LockedSource:
    """Return the locked commit of ``repo``; a plan cannot be made without it."""
    found = lock.source(repo, revision)
    if found is None:
        fix = "run `spark-deploy lock`, or set locked: first-use"
        raise PlanError.one(f"lock: {repo}", f"revision {revision} is not locked", fix)
    for file in found.files:
        if why := why_left_out(file.path):
            what = f"{file.path} is not fetched any more: {why}"
            fix = f"run `spark-deploy lock --update {repo}`; the tree is fetched anew without it"
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
