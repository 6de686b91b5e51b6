"""``spark-deploy plan``: the plan of each host as text or JSON; hosts are asked when told to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from spark_deploy.catalog.model import Model
from spark_deploy.catalog.profile import Profile
from spark_deploy.cli.hosts import Listed, answer, listed, planned, say
from spark_deploy.cli.looking import look
from spark_deploy.cli.looks.doctor import surveyed
from spark_deploy.cli.planned import reuse
from spark_deploy.cli.planned.brief import brief
from spark_deploy.cli.planned.brief import row as _row
from spark_deploy.cli.planned.parts import UNMEASURED, lines, speed
from spark_deploy.cli.planned.recalibrated import calibration
from spark_deploy.cli.taken import Options
from spark_deploy.errors import LockError
from spark_deploy.inventory.held import hold_if_told
from spark_deploy.lockfile.file import read_lock
from spark_deploy.planning.budget.speed import Calibration
from spark_deploy.planning.resolve import pair_of
from spark_deploy.planning.serving.release import document
from spark_deploy.planning.types import HostPlan


def run(options: Options) -> int:
    """Print the plans of the chosen hosts."""
    hosts = listed(options)
    try:
        plans = [planned(host, estimate=options.estimate) for host in hosts]
    except LockError as error:
        if options.estimate:
            raise
        around = "; or add --estimate, which asks no hub"
        raise LockError([replace(one, fix=one.fix + around) for one in error.problems]) from error
    for host in () if options.estimate else hosts:
        hold(host)
    there = _there(hosts, plans) if options.on_host else {}
    texts = (
        text(plan, *pair_of(host.settings.settings, host.catalog), verbose=options.verbose,
             there=reuse.told(found) if (found := there.get(plan.host)) else "",
             measured=calibration(host.settings.root, host.catalog))
        for plan, host in zip(plans, hosts, strict=True)
    )  # fmt: skip
    more = [{"reuse": there.get(plan.host)} if options.on_host else {} for plan in plans]
    documents = [{**document(plan), **one} for plan, one in zip(plans, more, strict=True)]
    answer(options, documents, texts)
    return 0 if not options.on_host or len(there) == len(hosts) else 1


def _there(hosts: Sequence[Listed], plans: Sequence[HostPlan]) -> dict[str, reuse.Reuse]:
    """Ask hosts what of their plans lies there already."""
    needs = {plan.host: plan.needs for plan in plans}
    answers = look(hosts, lambda host, one: surveyed(host, needs[one.name]))
    for one in answers:
        if one.value is None:
            say(f"{one.host.name}: {one.problem}")
    return {
        one.host.name: reuse.reused(one.value.stored, needs[one.host.name])
        for one in answers
        if one.value is not None
    }


def text(
    plan: HostPlan,
    model: Model,
    profile: Profile,
    *,
    verbose: bool,
    there: str = "",
    measured: Calibration = UNMEASURED,
) -> Iterator[str]:
    """Yield what a person asked for of the plan of one host, or all of it.

    ``there`` says what of it lies on the host already, ``measured`` what reports say of the speed.
    """
    yield from brief(plan, profile)
    if there:
        yield _row("on the host", there)
    if verbose:
        yield from lines(plan, model, profile, measured)
        return
    yield from itertools.islice(speed(plan, model, profile, measured), 1)
    yield _row("more", "with -v: what is fetched, built and started, with which arguments")


def hold(host: Listed) -> None:
    """Hold the names of what a host builds against the catalog, where the lock has not seen it."""
    path = host.settings.lock_path
    lock = host.looked_up.get(path) or read_lock(path)
    host.looked_up[path] = hold_if_told(host.settings.settings, host.catalog, lock, say)
