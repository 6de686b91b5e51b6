"""Which trees a host needs, and the plan of the tree we build from them."""

from __future__ import annotations

from typing import Any

from spark_deploy.catalog.model import Model
from spark_deploy.catalog.profile import Profile
from spark_deploy.errors import PlanError
from spark_deploy.lockfile.types import Lock, LockedSource
from spark_deploy.planning.budget.weights import weights_of
from spark_deploy.planning.digest import digest_of
from spark_deploy.planning.types import CheckpointPlan, PayloadIdentity, SourcePlan
from spark_deploy.settings.types import Settings


def locked_source(lock: Lock, repo: str, revision: str) -> LockedSource:
    """Return the locked commit of ``repo``; a plan cannot be made without it."""
    found = lock.source(repo, revision)
    if found is None:
        fix = "run `spark-deploy lock`, or set locked: first-use"
        raise PlanError.one(f"lock: {repo}", f"revision {revision} is not locked", fix)
    return found


def source_plan(role: str, source: LockedSource, settings: Settings) -> SourcePlan:
    """Return the plan to fetch one repository whole."""
    name = source.repo.replace("/", "--")
    return SourcePlan(
        role=role,
        repo=source.repo,
        commit=source.commit,
        dir=f"{settings.paths.sources_dir}/{name}-{source.commit[:12]}",
        files=source.files,
        endpoint=settings.hub.endpoint,
        mirrors=settings.hub.mirrors,
        look_in=settings.downloads.look_in,
        parallel=settings.downloads.parallel,
        rate_limit_bytes_per_s=settings.downloads.rate_limit_bytes_per_s,
        token_needed=settings.hub.token is not None,
        tries=settings.downloads.tries,
        retry_pause_s=settings.downloads.retry_pause_s,
    )


def refuse_impossible_trees(model: Model, profile: Profile, settings: Settings) -> None:
    """Raise one error for a tree that cannot be built, or not kept as the settings wish."""
    where = f"profile {profile.name}"
    if settings.checkpoint.prebuilt:
        _refuse_no_hybrid(model, profile)
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


def _refuse_no_hybrid(model: Model, profile: Profile) -> None:
    where = f"model {model.name} with profile {profile.name}: checkpoint.prebuilt"
    without = "set checkpoint.prebuilt: false"
    if model.sources.hybrid is None:
        what = "this model names no prebuilt hybrid"
        raise PlanError.one(where, what, f"name one in its sources.hybrid, or {without}")
    if profile.shared_experts != "fp8-base":
        what = f"a hybrid holds shared experts in FP8, this profile wants {profile.shared_experts}"
        raise PlanError.one(where, what, without)
    if profile.layout == "overlay":
        what = "a hybrid holds them under their plain names, which an overlay drops"
        raise PlanError.one(where, what, f"set checkpoint.layout: full beside it, or {without}")


def checkpoint_plan(
    model: Model, profile: Profile, settings: Settings, lock: Lock, payload: PayloadIdentity
) -> CheckpointPlan | None:
    """Return the plan of the tree to build; ``None`` when the base is served as it is."""
    if not profile.builds_checkpoint:
        return None
    role, repo = "base", model.sources.base
    if settings.checkpoint.prebuilt and model.sources.hybrid:
        role, repo = "ready", model.sources.hybrid
    base = source_plan(role, locked_source(lock, repo, model.sources.revision), settings)
    donor = _donor(model, profile, lock)
    builder = {**builder_plan(model, profile), "recipe_version": payload.recipe_version}
    digest = digest_of(
        {
            "base": base.digest,
            "donor": donor and {"repo": donor.repo, "commit": donor.commit},
            "builder": builder,
        }
    )
    return CheckpointPlan(
        name=builder["name"],
        dir=f"{settings.paths.models_dir}/{builder['name']}-{digest[:12]}",
        base=base,
        donor_repo=donor.repo if donor else None,
        donor_commit=donor.commit if donor else None,
        donor_url=f"{settings.hub.endpoint}/{donor.repo}/resolve/{donor.commit}" if donor else None,
        builder=builder,
        recipe_version=payload.recipe_version,
        output_bytes=output_bytes(model, profile, base.size_bytes),
        donor_bytes=weights_of(model.architecture).shared_fp8_bytes if donor else 0,
        keep_base=settings.checkpoint.keep_base,
        digest=digest,
    )


def builder_plan(model: Model, profile: Profile) -> dict[str, Any]:
    """Return PLAN.json without paths, donor address and digest.

    The name carries no profile: profiles that want the same tree share one.
    """
    tensors = model.tensors
    return {
        "schema_version": 1,
        "name": model.name,
        "swap": list(tensors.swap),
        "block_shape": list(tensors.block_shape),
        "base_tensors": list(tensors.base),
        "donor_unmatched": list(tensors.donor_unmatched),
        "donor_shapes": [
            {"modules": part.modules, "weight": list(part.weight), "scale": list(part.scale)}
            for part in tensors.donor_shapes
        ],
        "mtp_tensors": list(tensors.mtp),
        "shared_experts": profile.shared_experts,
        "head": profile.checkpoint_head,
        "layout": profile.layout,
        "extra": {},
    }


def output_bytes(model: Model, profile: Profile, base_bytes: int) -> int:
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


def _donor(model: Model, profile: Profile, lock: Lock) -> LockedSource | None:
    if profile.shared_experts not in ("fp8-donor", "fp8-base"):
        return None
    if model.sources.donor is None:
        what = f"profile {profile.name} takes shared experts from an FP8 donor; this model has none"
        fix = "name one in its sources.donor, or choose a profile with another shared_experts"
        raise PlanError.one(f"catalog/models/{model.name}.yml", what, fix)
    return locked_source(lock, model.sources.donor, model.sources.revision)
