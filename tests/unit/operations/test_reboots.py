import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyinfra.api.exceptions import ConnectError
from spark_contract.machine import BOOT_ID

from spark_deploy.hosts import preflight, serve
from spark_deploy.hosts.serve import LastRebootReason
from spark_deploy.hosts.status import HostStatus
from tests.unit.operations.fake_host import FakeHost, run_operation, sections_of
from tests.unit.operations.test_operations import NEEDS
from tests.unit.shell import run_script

MARKER = "/var/lib/spark/receipts/rebooted-for"
MISMATCH = ["Failed to initialize NVML: Driver/library version mismatch", "rc=18"]
KERNEL = {"kernels": ["6.17.0-1021-nvidia", "6.17.0-1029-nvidia"]}
PENDING = "kernel 6.17.0-1029-nvidia is installed, but 6.17.0-1021-nvidia is running"
RELEASE: Any = SimpleNamespace(service="main", start_timeout_s=10)
ALLOWED = dataclasses.replace(NEEDS, reboot="allow")


def factory_spark(rebooted_for="", status=None, **sections):
    return FakeHost(
        sections_of({"like": "HostSurvey/factory_spark", **sections}),
        LastRebootReason=lambda path: rebooted_for if path == MARKER else "",
        Status=status or HostStatus(None),
    )


def reboot(host, *failed, executing=True):
    results = {other: SimpleNamespace(error_ops={"op"}) for other in failed}
    host.state = SimpleNamespace(inventory=failed, results=results)
    return run_operation(host, serve.reboot_host, ALLOWED, RELEASE, executing=executing)


def test_host_without_pending_reboot_is_not_rebooted():
    host = factory_spark()
    assert reboot(host) == []
    assert host.noops == ["no reboot is pending"]


@pytest.mark.parametrize(
    ("sections", "cause"),
    [
        (KERNEL, PENDING),
        ({"reboot": ["required", "libc6"]}, "/run/reboot-required exists (libc6)"),
        ({"smi": ["NVIDIA GB10, 580.159.03", "rc=0"]},
         "driver module 580.142 is loaded, but library 580.159.03 is installed"),
        ({"smi": MISMATCH},
         "driver module 580.142 is loaded, but library of another version is installed"),
    ],
)  # fmt: skip
def test_host_is_rebooted_for_each_cause_and_the_cause_is_reported(sections, cause):
    [command] = reboot(factory_spark(**sections))
    assert command.startswith(f"_reboot({cause}, ")


def test_host_is_not_rebooted_twice_for_the_same_cause():
    host = factory_spark(rebooted_for=PENDING, **KERNEL)
    assert reboot(host) == []
    assert "is not rebooted again" in host.noops[0]


def test_reboot_marker_is_ignored_until_the_next_boot(tmp_path):
    marker, this_boot = tmp_path / "rebooted-for", Path(BOOT_ID).read_text().strip()
    for text, expected in (
        (None, ""),
        (f"{this_boot}\n{PENDING}", ""),
        (f"{'0' * 36}\n{PENDING}", PENDING),
    ):
        if text:
            marker.write_text(text)
        output = run_script(LastRebootReason().command(path=str(marker)))
        assert LastRebootReason().process(output) == expected


def test_reboot_marker_contains_the_previous_boot_id(monkeypatch):
    written: list[str] = []

    def run(host, command, stdin="", **_):
        written.extend([stdin] if stdin else [])
        return ["the-boot-before"]

    def lose(*_):
        raise ConnectError("spark-1 stayed unreachable")

    monkeypatch.setattr(serve.commands, "run", run)
    monkeypatch.setattr(serve.commands, "run_reconnecting", lose)
    monkeypatch.setattr(serve.gevent, "sleep", lambda _: None)
    assert not serve._reboot(None, factory_spark(), PENDING, ALLOWED, RELEASE)
    assert written == [f"the-boot-before\n{PENDING}"]


def test_does_not_reboot_if_another_host_failed_or_tools_are_unreadable():
    [command] = reboot(factory_spark(**KERNEL), FakeHost(name="spark-0"))
    assert command.startswith("_report_failure(")
    assert "not rebooted, because spark-0 failed first" in command
    unreadable = HostStatus(None, "the host tools are of another version (x)")
    [command] = reboot(factory_spark(status=unreadable, **KERNEL))
    assert command.startswith("_report_failure(")
    assert "the host tools are of another version" in command


def test_preflight_does_not_check_a_host_that_will_reboot():
    host = factory_spark(smi=MISMATCH)
    [command] = run_operation(host, preflight.check_host, ALLOWED, executing=False)
    assert command.startswith("_report_failure(")
    reboot(host, executing=False)
    assert run_operation(host, preflight.check_host, ALLOWED, executing=False) == []
    assert host.noops[-1] == "this host will be checked after the reboot"
