"""Names before bytes: what a host builds from is held against the catalog before it is fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from spark_contract.work.orders import BuildPlan

from spark_deploy.catalog.model import PlainModel
from spark_deploy.catalog.types import Catalog
from spark_deploy.errors import LockError
from spark_deploy.lockfile import names
from spark_deploy.lockfile.anatomy import read_anatomy
from spark_deploy.lockfile.file import checked, write_lock
from spark_deploy.lockfile.resolve import beside_of, size
from spark_deploy.lockfile.types import HeldNames, Lock
from spark_deploy.planning.resolve import pair_of
from spark_deploy.planning.types import SourcePlan
from spark_deploy.planning.work.checkpoint import checkpoint_plan
from spark_deploy.settings.types import Settings

Say = Callable[[str], None]


class Unread(NamedTuple):
    """A repository whose headers nobody read at its commit, and files that are not its weights."""

    repository: str
    commit: str
    leave_out: tuple[str, ...]


def open_questions(
    settings: Settings, catalog: Catalog, lock: Lock
) -> Iterator[tuple[HeldNames, BuildPlan]]:
    """Yield every build of a host whose names the lock says nothing of; its sources are locked."""
    for one in settings.all_served:
        if one.checkpoint.requantized:
            continue  # no hub has its base; the builder holds it when it is there
        plan = checkpoint_plan(*pair_of(one, catalog), one, lock)
        if plan is not None and isinstance(plan.base, SourcePlan):
            asked = names.question(plan.order, plan.base.locked, plan.donor)
            if not lock.holds(asked):
                yield asked, plan.order


def unread(settings: Settings, catalog: Catalog, lock: Lock) -> Iterator[Unread]:
    """Yield every repository served as published whose headers the lock says nothing of."""
    for one in settings.all_served:
        model = catalog.model(one.model)
        wanted: list[tuple[str, str, tuple[str, ...]]] = [
            (*each, ()) for each in beside_of(model, catalog.profile(one.profile, one.model))
        ]
        if isinstance(model, PlainModel):
            wanted.append((model.repository, model.revision, model.leave_out))
        for repository, revision, leave_out in wanted:
            locked = lock.source(repository, revision)
            read = lock.anatomies.get(repository)
            if locked is not None and (read is None or read.leave_out != leave_out):
                yield Unread(repository, locked.commit, leave_out)


def read_repositories(settings: Settings, catalog: Catalog, lock: Lock, say: Say) -> Lock:
    """Return the lock with what headers say of repositories that are served as published."""
    for one in dict.fromkeys(unread(settings, catalog, lock)):
        found = read_anatomy(one.repository, one.commit, settings.hub, leave_out=one.leave_out)
        lock = checked(lock.also(anatomies=[found]))
        say(f"  {one.repository}: {found.architecture or 'no architecture named'}, weights "
            f"{size(found.weights_bytes)}")  # fmt: skip
    return lock


def hold_names(settings: Settings, catalog: Catalog, lock: Lock, say: Say) -> Lock:
    """Return the lock with what was found of every build; the hub is asked for what is open.

    Raises:
        HubSilent: The hub did not send the headers.
        LockError: Base or donor are not what the catalog says, or a repository is no model.
    """
    lock = read_repositories(settings, catalog, lock, say)
    for asked, order in open_questions(settings, catalog, lock):
        found = names.hold(asked, order, settings.hub)
        lock = lock.also(names=[found])
        say(f"  {asked.build}: {_found(found)} are as the catalog says")
    return lock


def hold_if_told(settings: Settings, catalog: Catalog, lock: Lock, say: Say) -> Lock:
    """Return what ``hold_names`` does; a hub that is silent is said, and asked the next time."""
    try:
        return hold_names(settings, catalog, lock, say)
    except names.HubSilent as error:
        say(f"names are not held against the catalog yet: {error.problems[0].line}")
        return lock


def held_for(settings: Settings, catalog: Catalog, path: Path, lock: Lock, say: Say) -> Lock:
    """Return the lock for a deploy, with new findings written down where that is allowed."""
    if settings.locked == "required":
        for asked, _ in open_questions(settings, catalog, lock):
            say(f"{path.name}: names of {asked.build} are not held yet: run `spark-deploy lock`")
        for one in unread(settings, catalog, lock):
            what = f"headers of {one.repository} are not read yet"
            raise LockError.one(path.name, what, "run `spark-deploy lock` and keep the file")
        return lock
    held = hold_if_told(settings, catalog, lock, say)
    if held != lock:
        write_lock(path, held)
    return held


def _found(held: HeldNames) -> str:
    """Say whose names were looked at: ``464 names of ORG/BASE and 80 of ORG/DONOR``."""
    counted = [(held.base_tensors, held.base), (held.donor_tensors, held.donor)]
    base, *donor = (
        f"{count:,} names of {place.split('@')[0]}" for count, place in counted if place
    )
    return " and ".join([base, *donor])
