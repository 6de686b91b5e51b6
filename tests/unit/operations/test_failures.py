import os
import subprocess
import sys
from pathlib import Path

import pytest
from spark_contract.documents import to_json

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.hosts import operations
from tests.unit.operations.fake_host import FakeHost
from tests.unit.statuses import host_status

REFUSED = """
from pyinfra.context import host, state
from spark_deploy.hosts import operations
operations.LEASE = "{0}/lease"
operations.hold_lease(state, host)
@operations.host_operation
def check():
    if state.is_executing:
        operations.fail("memory", "70 GiB needed", "choose a smaller model")
    yield "true"
check(name="check")
"""


@pytest.mark.slow
def test_plain_pyinfra_repeats_the_failure_at_the_end(tmp_path):
    (tmp_path / "check.py").write_text(REFUSED.format(tmp_path))
    result = subprocess.run(
        [Path(sys.executable).with_name("pyinfra"), "@local", "check.py", "-y"], cwd=tmp_path,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'files/contract'}"},
    )  # fmt: skip
    assert result.returncode == 1
    before, _, after = result.stderr.partition("--> Disconnecting from hosts")
    for part in (before, after):
        assert part.count("memory: 70 GiB needed") == 1, result.stderr
        assert part.count("  fix: choose a smaller model") == 1


@pytest.mark.parametrize("active", ["main-aaaaaaaaaaaa", None])
@pytest.mark.parametrize(
    ("problem", "outcome"),
    [
        ("memory: 70 GiB needed", "this deploy failed: memory: 70 GiB needed"),
        ("not changed, because spark-0 failed", "not changed, because spark-0 failed"),
    ],
)
def test_rejected_host_reports_its_serving_release(active, problem, outcome):
    releases = [{"name": "main-aaaaaaaaaaaa", "model": "large", "profile": "agent"}]
    service = {"active": active, "traffic_open": True}
    status = host_status({"releases": releases, "services": {"main": service}})
    host = FakeHost(shell=lambda _: to_json(status.report))
    operations._report_failure(None, host, f"spark-1: {problem}\n  fix: a smaller model")
    serves = "still serves large with agent" if active else "serves nothing"
    assert host.logs == [f"spark-1 {serves}; {outcome}", "  fix: a smaller model"]


@pytest.mark.parametrize("lost", [True, False])
def test_unresponsive_host_is_rejected_with_a_single_error(lost):
    host = FakeHost(shell=lambda _: TimeoutError("late"), connected=not lost)
    assert operations._report_failure(None, host, "spark-1: lost") is False
    assert host.logs == ["spark-1: lost"]
