"""``spark-deploy plan``: the plan of each host as text or JSON; hosts are asked when told to."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from spark_deploy.cli import plan_summary
from spark_deploy.cli.doctor import surveyed
from spark_deploy.cli.hosts import Target, build_plan, select_hosts
from spark_deploy.cli.options import Options, shared_options
from spark_deploy.cli.plan_summary import brief
from spark_deploy.cli.plan_summary import row as _row
from spark_deploy.cli.plan_text import UNMEASURED, lines, speed
from spark_deploy.cli.query_hosts import query
from spark_deploy.cli.report import HostReport, read_report
from spark_deploy.cli.terminal import note, print_result
from spark_deploy.config.catalog.model import HybridModel, Model
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import LockError, SparkError
from spark_deploy.inventory.host_names import hold_if_told
from spark_deploy.lock.file import read_lock
from spark_deploy.plan.release import document
from spark_deploy.plan.resolve import pair_of
from spark_deploy.plan.speed import Calibration, calibrated, speed_of
from spark_deploy.plan.types import HostPlan

ONE_STREAM = "one_stream_tokens_per_s"


@dataclass(frozen=True, slots=True)
class Measured:
    """What one Spark measured of one request, beside what is computed."""

    report: str
    model: str
    profile: str
    tokens_per_s: float
    computed_tokens_per_s: float


def calibration(root: Path, catalog: Catalog) -> Calibration:
    """Return what the reports of this checkout and of an inventory's folder say together."""
    found = measured(files_of(root), catalog)
    return calibrated((one.tokens_per_s, one.computed_tokens_per_s) for one in found)


def files_of(root: Path) -> list[Path]:
    """Return the reports of the checkout, and those that lie in a folder or its ``reports``."""
    folders = (CHECKOUT / "reports", root / "reports")
    reports = [*root.glob("spark-report-*.json"), *(p for f in folders for p in f.glob("*.json"))]
    return sorted({path.resolve() for path in reports})


def measured(paths: Iterable[Path], catalog: Catalog) -> Iterator[Measured]:
    """Yield the speed of each Spark that was measured with a pair that the catalog knows.

    Of a host that several reports are of, each is a measurement of its own.
    """
    for path in paths:
        try:
            hosts = read_report(path).hosts
        except (OSError, SparkError) as error:
            note(f"{path}: the speed is computed without it: {error}")
            continue
        yield from (one for host in hosts for one in _of(path.name, host, catalog))


def _of(report: str, host: HostReport, catalog: Catalog) -> Iterator[Measured]:
    serving = host.serving
    if serving is None or not host.is_spark or serving.portable:
        return
    profile = catalog.profiles.get((serving.profile, serving.model))
    found = serving.speed.get(ONE_STREAM)
    if profile is None or not found:
        return
    model = catalog.model(serving.model)
    if isinstance(model, HybridModel):
        computed = speed_of(model.architecture, profile).tokens_per_s
        yield Measured(report, model.name, profile.name, found, computed)


@click.command
@click.option("--estimate", is_flag=True, help="Work offline: sizes from the architecture.")
@click.option("--on-host", is_flag=True, help="Show what hosts already have.")
@click.option("-v", "--verbose", is_flag=True, help="Show files, unit and engine arguments.")
@shared_options(plans=True)
def plan(options: Options, estimate: bool, on_host: bool) -> int:
    """Exit with 1 if a host did not answer."""
    hosts = select_hosts(options)
    try:
        plans = [build_plan(host, estimate=estimate) for host in hosts]
    except LockError as error:
        if estimate:
            raise
        around = "; or add --estimate, which asks no hub"
        raise LockError([replace(one, fix=one.fix + around) for one in error.problems]) from error
    for host in () if estimate else hosts:
        hold(host)
    there = _there(hosts, plans) if on_host else {}
    texts = (
        text(plan, *pair_of(host.settings.settings, host.catalog), verbose=options.verbose,
             there=plan_summary.told(found) if (found := there.get(plan.host)) else "",
             measured=calibration(host.settings.root, host.catalog))
        for plan, host in zip(plans, hosts, strict=True)
    )  # fmt: skip
    more = [{"reuse": there.get(plan.host)} if on_host else {} for plan in plans]
    documents = [{**document(plan), **one} for plan, one in zip(plans, more, strict=True)]
    print_result(options, documents, texts)
    return 0 if not on_host or len(there) == len(hosts) else 1


def _there(hosts: Sequence[Target], plans: Sequence[HostPlan]) -> dict[str, plan_summary.Reuse]:
    """Ask hosts what of their plans lies there already."""
    needs = {plan.host: plan.needs for plan in plans}
    answers = query(hosts, lambda host, one: surveyed(host, needs[one.name]))
    for one in answers:
        if one.value is None:
            note(f"{one.host.name}: {one.problem}")
    return {
        one.host.name: plan_summary.reused(one.value.stored, needs[one.host.name])
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


def hold(host: Target) -> None:
    """Hold the names of what a host builds against the catalog, where the lock has not seen it."""
    path = host.settings.lock_path
    lock = host.looked_up.get(path) or read_lock(path)
    host.looked_up[path] = hold_if_told(host.settings.settings, host.catalog, lock, note)
