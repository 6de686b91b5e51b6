"""The checks of a release, as a rollout asks for them."""

from __future__ import annotations

from typing import Any

from spark_contract.paths import Paths
from spark_contract.records import Proof
from spark_contract.release import Release

from spark_host.check import measure, runner
from spark_host.records import upgrades
from spark_host.records.proof import versions as versions
from spark_host.system.ports import Host
from spark_host.system.programs import Report


def full(release: Release, host: Host, report: Report) -> Proof:
    """Run the full check on a release's engine; see :func:`runner.check`."""
    return runner.check(release, host, "full", report)


def speed(release: Release, paths: Paths, report: Report) -> dict[str, Any]:
    """Measure how fast a release answers, for as long as it asks for; see ``measure.py``."""
    limit_s = release.check.bench.limit_s if release.check.bench else 0
    found = measure.measure(release, paths, limit_s, report)
    return {**found, "packages": upgrades.packages()}
