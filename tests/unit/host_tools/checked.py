"""Checks a release of the stub engine."""

from __future__ import annotations

from spark_contract.records import Proof
from spark_contract.release import Release
from spark_host.check import runner
from stub_host import Host


def check(host: Host, release: Release, level: str = "deep") -> Proof:
    return runner.check(release, host.here, level, print, invocation_id="run-1")


def failed(result: Proof) -> dict[str, str]:
    return {item.name: item.detail for item in result.failed}


def warned(result: Proof) -> dict[str, str]:
    return {item.name: item.detail for item in result.warnings}
