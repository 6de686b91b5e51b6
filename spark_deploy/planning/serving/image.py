"""Which engine image serves a release: the base as it is, or with our plugin layer on top."""

from __future__ import annotations

from spark_contract.units import IMAGE_NAME

from spark_deploy.catalog.model import Model
from spark_deploy.catalog.profile import Profile
from spark_deploy.errors import PlanError
from spark_deploy.lockfile.types import Lock, LockedImage
from spark_deploy.planning.types import ImagePlan, PayloadIdentity
from spark_deploy.settings.types import Settings

# Engine versions the plugin is tested with; its own check refuses others while building.
SUPPORTED_ENGINES = ("0.30.0", "0.32.0", "0.33.0")


def image_plan(
    model: Model, profile: Profile, settings: Settings, lock: Lock, payload: PayloadIdentity
) -> ImagePlan:
    """Return the plan of the engine image."""
    base = locked_image(model, settings, lock, model.image.role)
    plugin = profile.plugin and model.image.plugin
    plan = ImagePlan(
        base=base.pinned,
        tag=base.pinned,
        # Without our layer its content must not change the identity.
        context_digest=payload.image_context_digest if plugin else "",
        plugin=plugin,
        supported_engines=SUPPORTED_ENGINES if plugin else (),
        pull_only=not plugin,
        size_bytes=base.size_bytes,
    )
    if not plugin:
        return plan
    return ImagePlan(
        base=plan.base,
        tag=f"{IMAGE_NAME}:{plan.digest[:12]}",
        context_digest=plan.context_digest,
        plugin=True,
        supported_engines=SUPPORTED_ENGINES,
        pull_only=False,
        size_bytes=plan.size_bytes,
    )


def locked_image(model: Model, settings: Settings, lock: Lock, role: str) -> LockedImage:
    """Return the locked image of a role of the settings."""
    reference = settings.images.get(role)
    if reference is None:
        what = f"needs the image role '{role}', which the settings do not have"
        fix = f"set images.{role} (known: {', '.join(sorted(settings.images))})"
        raise PlanError.one(f"catalog/models/{model.name}.yml: image.role", what, fix)
    found = lock.image(reference)
    if found is None:
        fix = "run `spark-deploy lock`, or set locked: first-use"
        raise PlanError.one(f"lock: {reference}", "is not locked to a digest", fix)
    return found
