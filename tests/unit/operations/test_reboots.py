"""A host is rebooted only for a cause that is pending, once, and never beside a failed one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyinfra.api.exceptions import ConnectError
from spark_contract.machine import BOOT_ID

from spark_deploy.hosts import preflight, serve
from spark_deploy.hosts.serve import RebootedFor
from spark_deploy.hosts.status import HostStatus
from tests.unit.operations.test_operations import NEEDS, FakeHost, on, sections_of, shown
from tests.unit.shell import run_script

NOTE = "/var/lib/spark/receipts/rebooted-for"
MISMATCH = ["Failed to initialize NVML: Driver/library version mismatch", "rc=18"]
KERNEL = {"kernels": ["6.17.0-1021-nvidia", "6.17.0-1029-nvidia"]}
PENDING = "kernel 6.17.0-1029-nvidia is installed, 6.17.0-1021-nvidia is running"
SERVE: Any = SimpleNamespace(service="main", start_timeout_s=10)
ALLOWED = dataclasses.replace(NEEDS, reboot="allow")


def factory_spark(marker: str = "", status: HostStatus | None = None, **sections: Any) -> FakeHost:
    """Return a Spark from the factory; ``marker`` is the reason of an earlier reboot."""
    like = sections_of({"like": "HostSurvey/factory_spark", **sections})
    return FakeHost(
        like,
        RebootedFor=lambda path: marker if path == NOTE else "",
        Status=status or HostStatus(None),
    )


def asked(host: FakeHost, failed: tuple[str, ...] = (), executing: bool = True) -> list[str]:
    others = [FakeHost({}) for _ in failed]
    for other, name in zip(others, failed, strict=True):
        other.name = name
    results = {other: SimpleNamespace(error_ops={"op"}) for other in others}
    with on(host, executing):
        host.state = SimpleNamespace(inventory=others, results=results)
        return [shown(c) for c in serve.reboot_host._inner(ALLOWED, SERVE)]


def test_a_host_without_a_cause_is_left_up() -> None:
    host = factory_spark()
    assert asked(host) == []
    assert host.noops == ["no reboot is pending"]


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        (KERNEL, PENDING),
        ({"reboot": ["required", "libc6"]}, "/run/reboot-required is set (libc6)"),
        (
            {"smi": ["NVIDIA GB10, 580.159.03", "rc=0"]},
            "driver module 580.142 is loaded, library 580.159.03 is installed",
        ),
        (
            {"smi": MISMATCH},
            "driver module 580.142 is loaded, library of another version is installed",
        ),
    ],
)
def test_each_cause_reboots_the_host_and_is_named(sections: dict[str, Any], why: str) -> None:
    commands = asked(factory_spark(**sections))
    assert len(commands) == 1
    assert commands[0].startswith(f"_reboot({why}, ")


def test_a_cause_that_a_reboot_did_not_cure_is_not_tried_again() -> None:
    host = factory_spark(marker=PENDING, **KERNEL)
    assert asked(host) == []
    assert "was rebooted for this already" in host.noops[0]


def test_a_reboot_that_never_came_about_was_not_tried(tmp_path: Path) -> None:
    """A run may be killed, and systemd refuse, after it was written down what it is for."""
    marker, this_boot = tmp_path / "rebooted-for", Path(BOOT_ID).read_text().strip()

    def seen() -> str:
        command = RebootedFor().command(path=str(marker))
        return RebootedFor().process(run_script(command))

    assert seen() == ""
    marker.write_text(f"{this_boot}\n{PENDING}")
    assert seen() == ""
    marker.write_text(f"{'0' * 36}\n{PENDING}")
    assert seen() == PENDING


def test_what_a_reboot_is_for_is_noted_under_the_boot_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[str] = []

    def run(host: Any, command: str, **more: Any) -> list[str]:
        if "stdin" in more:
            noted.append(more["stdin"])
        return ["the-boot-before"]

    monkeypatch.setattr(serve, "run", run)

    def gone(*_: Any) -> None:
        raise ConnectError("spark-1 stayed unreachable")

    monkeypatch.setattr(serve, "run_reconnecting", gone)
    monkeypatch.setattr(serve.gevent, "sleep", lambda _: None)
    assert not serve._reboot(None, factory_spark(), PENDING, ALLOWED, SERVE)  # type: ignore[arg-type]
    assert noted == [f"the-boot-before\n{PENDING}"]


def test_a_host_is_not_rebooted_after_another_failed() -> None:
    commands = asked(factory_spark(**KERNEL), failed=("spark-0",))
    assert len(commands) == 1
    assert commands[0].startswith("_refuse(")
    assert "not rebooted, because spark-0 failed first" in commands[0]


def test_a_host_whose_tools_cannot_be_understood_is_not_rebooted() -> None:
    """Afterwards nobody could tell whether it serves again."""
    status = HostStatus(None, "its host tools are of another version (x)")
    commands = asked(factory_spark(status=status, **KERNEL))
    assert len(commands) == 1
    assert commands[0].startswith("_refuse(")
    assert "its host tools are of another version" in commands[0]
    assert "`reboot: report` first" in commands[0]


def test_preflight_does_not_judge_what_a_reboot_will_change() -> None:
    host = factory_spark(smi=MISMATCH)
    with on(host, executing=False):
        commands = [shown(c) for c in preflight.check_host._inner(ALLOWED)]
    assert commands[0].startswith("_refuse(")
    asked(host, executing=False)
    with on(host, executing=False):
        assert list(preflight.check_host._inner(ALLOWED)) == []
    assert host.noops[-1] == "judged after the reboot"
