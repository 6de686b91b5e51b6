"""What an engine reads beside the tree, and where it lies in the container."""

from __future__ import annotations

from spark_contract.images import LayersPlan, parse_reference
from spark_contract.units import IMAGE_NAME

from spark_deploy.config.catalog.model import Model
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.documents.digest import digest_of
from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.types import Settings
from spark_deploy.lock.types import Lock, LockedImage
from spark_deploy.plan.checkpoint import locked_source, source_plan
from spark_deploy.plan.engine_arguments import ADAPTERS_MOUNT, DRAFTER_MOUNT
from spark_deploy.plan.machine import PayloadIdentity
from spark_deploy.plan.types import BesidePlan, ImagePlan


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
