"""What an engine reads beside the tree, and where it lies in the container."""

from __future__ import annotations

from spark_deploy.catalog.model import Model
from spark_deploy.catalog.profile import Profile
from spark_deploy.lockfile.types import Lock
from spark_deploy.planning.engine.argv import ADAPTERS_MOUNT, DRAFTER_MOUNT
from spark_deploy.planning.types import BesidePlan
from spark_deploy.planning.work.checkpoint import locked_source, source_plan
from spark_deploy.settings.types import Settings


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
