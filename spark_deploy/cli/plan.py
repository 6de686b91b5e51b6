"""``spark-deploy plan``: the plan of each host as text or JSON."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click

from spark_deploy.cli.console import Options, note, print_result, shared_options
from spark_deploy.cli.doctor import Reuse, describe_reuse, find_reusable, read_survey
from spark_deploy.cli.hosts import build_plan, query_or_note, select_hosts
from spark_deploy.cli.plan_text import download_peer, plan_text
from spark_deploy.cli.report import HostReport, read_report
from spark_deploy.config.catalog.model import HybridModel
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import LockError, SparkError
from spark_deploy.inventory.plans import verify_names_if_online
from spark_deploy.lock.resolve import read_lock
from spark_deploy.plan.host import plan_document
from spark_deploy.plan.resolve import model_and_profile
from spark_deploy.plan.speed import Calibration, calibrated, compute_speed

ONE_STREAM = "one_stream_tokens_per_s"


@click.command
@click.option(
    "--estimate", is_flag=True, help="Work offline, with sizes computed from the architecture."
)
@click.option("--on-host", is_flag=True, help="Show which downloads are already on the hosts.")
@click.option("-v", "--verbose", is_flag=True, help="Show files, unit and engine arguments.")
@shared_options(plans=True)
def plan(options: Options, estimate: bool, on_host: bool) -> int:
    """Return 1 if a host did not answer."""
    hosts = select_hosts(options)
    try:
        plans = [build_plan(host, estimate=estimate) for host in hosts]
    except LockError as error:
        if estimate:
            raise
        raise LockError([
            replace(problem, fix=f"{problem.fix}, or add --estimate to work offline")
            for problem in error.problems
        ]) from error  # fmt: skip
    if estimate:
        note("sizes are estimates; without --estimate, they come from the lock file")
    else:
        for host in hosts:
            # Compare tensor names with the catalog unless the lock file contains a result.
            path = host.loaded.lock_path
            lock = host.locks.get(path) or read_lock(path)
            host.locks[path] = verify_names_if_online(host.settings, host.catalog, lock, note)
    needs = {host_plan.host: host_plan.preflight for host_plan in plans}
    reuse: dict[str, Reuse] = {}
    if on_host:
        surveys = query_or_note(hosts, lambda host, target: read_survey(host, needs[target.name]))
        for host, survey in surveys:
            reuse[host.name] = find_reusable(survey.stored, needs[host.name])
    texts = (
        plan_text(
            host_plan, *model_and_profile(host.settings, host.catalog),
            verbose=options.verbose,
            present=describe_reuse(reuse[host.name]) if host.name in reuse else "",
            peer=download_peer(host_plan, plans[:number] if host.settings.fleet.share else ()),
            calibration=read_calibration(host.loaded.root, host.catalog),
        )
        for number, (host, host_plan) in enumerate(zip(hosts, plans, strict=True))
    )  # fmt: skip
    documents = [
        {**plan_document(host_plan), **({"reuse": reuse.get(host_plan.host)} if on_host else {})}
        for host_plan in plans
    ]
    print_result(options, documents, texts)
    return 0 if not on_host or len(reuse) == len(hosts) else 1


class MeasuredSpeed(NamedTuple):
    """The measured and computed speed of single requests on a Spark."""

    report_name: str
    model: str
    profile: str
    tokens_per_s: float
    computed_tokens_per_s: float


def read_calibration(root: Path, catalog: Catalog) -> Calibration:
    speeds = read_measured_speeds(root, catalog)
    return calibrated((speed.tokens_per_s, speed.computed_tokens_per_s) for speed in speeds)


def read_measured_speeds(root: Path, catalog: Catalog) -> Iterator[MeasuredSpeed]:
    files = list(root.glob("spark-report-*.json"))
    for folder in (CHECKOUT / "reports", root / "reports"):
        files += folder.glob("*.json")
    for path in sorted({path.resolve() for path in files}):
        try:
            hosts = read_report(path).hosts
        except (OSError, SparkError) as error:
            note(f"ignoring {path} when computing the speed: {error}")
            continue
        for host in hosts:
            yield from _measured_speeds(path.name, host, catalog)


def _measured_speeds(
    report_name: str, report: HostReport, catalog: Catalog
) -> Iterator[MeasuredSpeed]:
    serving = report.serving
    if serving is None or not report.is_spark or serving.portable:
        return
    profile = catalog.profiles.get((serving.profile, serving.model))
    measured = serving.speed.get(ONE_STREAM)
    if profile is None or not measured:
        return
    model = catalog.model(serving.model)
    if isinstance(model, HybridModel):
        computed = compute_speed(model.architecture, profile).tokens_per_s
        yield MeasuredSpeed(report_name, model.name, profile.name, measured, computed)
