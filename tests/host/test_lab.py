"""Guests of the lab survive reboots and crashes, and leave no trace on the machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labkit import STATE, Guest, info, lab

NAMES = ("lab-6", "lab-7", "lab-8")


@pytest.fixture(scope="module")
def guests() -> Iterator[dict[str, Guest]]:
    lab("up", *NAMES, "--fresh", "--engine", "none")
    yield {
        entry["name"]: Guest(entry["name"], entry["ip"])
        for entry in info()["guests"]
        if entry["name"] in NAMES
    }
    lab("down", *NAMES, "--delete")


def supervisor(name: str) -> int:
    return int((STATE / "guests" / name / "supervisor.pid").read_text())


def leftovers(name: str) -> list[str]:
    commands = (["ip", "netns"], ["ip", "link"], ["losetup", "-a"], ["cat", "/proc/mounts"])
    shown = "".join(subprocess.check_output(command, text=True) for command in commands)
    lines = [line for line in shown.splitlines() if re.search(rf"\b{name}\b", line)]
    return lines + [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/lab/{name}")]


def test_guests_are_separate_systems_without_failed_units(guests: dict[str, Guest]) -> None:
    for guest in guests.values():
        guest.wait('test "$(systemctl is-system-running)" = running')
        assert guest.run("systemctl --failed --no-legend") == ""
        assert guest.run("hostname") == guest.name
    for path in ("/etc/machine-id", "/etc/ssh/ssh_host_ed25519_key.pub"):
        assert len({guest.run(f"cat {path}") for guest in guests.values()}) == len(guests)


def test_reboot_and_power_cut_keep_the_disk(guests: dict[str, Guest]) -> None:
    guest, pid = guests["lab-7"], supervisor("lab-7")
    guest.run("echo kept > /var/lib/kept; sync")
    guest.reboot()
    guest.wait('test "$(systemctl is-system-running)" = running')
    assert guest.run("cat /var/lib/kept") == "kept"
    assert supervisor("lab-7") == pid
    lab("break", "kill-guest", "lab-7")
    assert "lab-7  10.77.0.17  stopped" in lab("status")
    lab("up", "lab-7", "--engine", "none")
    assert guest.run("cat /var/lib/kept") == "kept"


def test_up_adopts_guest_of_killed_supervisor_and_keeps_running_guests(
    guests: dict[str, Guest],
) -> None:
    before = supervisor("lab-8")
    os.kill(before, signal.SIGKILL)
    assert "lab-8  10.77.0.18  orphan" in lab("status")
    assert guests["lab-8"].run("hostname") == "lab-8"
    boots = {name: guests[name].boot_id() for name in NAMES[:2]}
    lab("up", *NAMES, "--engine", "none")
    assert supervisor("lab-8") != before
    assert {name: guests[name].boot_id() for name in NAMES[:2]} == boots


def test_faults_are_healed(guests: dict[str, Guest]) -> None:
    guest = guests["lab-7"]
    lab("break", "host-down", "lab-7")
    try:
        with pytest.raises(RuntimeError, match="lab-7"):
            guest.run("true", timeout_s=20)
    finally:
        lab("break", "host-down", "lab-7", "--heal")
    guest.wait("true", seconds=20)
    lab("break", "disk-full", "lab-7")
    try:
        refused = guest.run("head -c 64M /dev/zero 2>&1 > /srv/big; rm -f /srv/big", check=False)
    finally:
        lab("break", "disk-full", "lab-7", "--heal")
    assert "No space left on device" in refused
    guest.run("head -c 64M /dev/zero > /srv/big && rm /srv/big")


def test_down_leaves_only_the_disk_and_delete_nothing(guests: dict[str, Guest]) -> None:
    guests["lab-6"].run("echo kept > /var/lib/kept")
    lab("down", "lab-6")
    assert leftovers("lab-6") == []
    assert leftovers("lab-7") != []
    lab("up", "lab-6", "--engine", "none")
    assert guests["lab-6"].run("cat /var/lib/kept") == "kept"
    lab("down", "lab-6", "--delete")
    assert leftovers("lab-6") == []
    assert not (STATE / "guests/lab-6").exists()
