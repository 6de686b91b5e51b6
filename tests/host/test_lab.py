"""The lab itself: guests come up, reboot, survive crashes, and leave nothing behind.

Works on guests of its own beside whatever else is up.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
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


def traces(name: str) -> list[str]:
    """What the machine still shows of a guest, by tools the lab does not use for cleaning."""
    found = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    found += subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    found += Path("/proc/mounts").read_text()
    found += subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in found.splitlines() if re.search(rf"\b{name}\b", line)]
    return lines + [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/lab/{name}")]


def test_every_guest_is_a_running_system_with_no_failed_unit(guests: dict[str, Guest]) -> None:
    for guest in guests.values():
        guest.wait('test "$(systemctl is-system-running)" = running')
        assert guest.run("systemctl --failed --no-legend") == ""
        assert guest.run("hostname") == guest.name


def test_each_guest_has_an_identity_of_its_own(guests: dict[str, Guest]) -> None:
    for path in ("/etc/machine-id", "/etc/ssh/ssh_host_ed25519_key.pub"):
        assert len({guest.run(f"cat {path}") for guest in guests.values()}) == len(guests)


def test_a_guest_shows_the_hardware_of_a_spark(guests: dict[str, Guest]) -> None:
    guest = guests["lab-6"]
    assert "[10de:2e12]" in guest.run("lspci -nn -s 000f:01:00.0")
    assert guest.run("nvidia-smi --query-gpu=name --format=csv,noheader") == "NVIDIA GB10"
    assert "580.159.03+labstub" in guest.run("cat /proc/driver/nvidia/version")


def test_docker_of_one_guest_is_not_seen_by_another(guests: dict[str, Guest]) -> None:
    for name in ("lab-6", "lab-7"):
        guests[name].run(
            "apt-get -q update && DEBIAN_FRONTEND=noninteractive "
            "apt-get -q -y install --no-install-recommends " + " ".join(info()["docker_packages"]),
            timeout_s=180,
        )
    assert "overlay2" in guests["lab-6"].run("docker info --format '{{.Driver}}'")
    guests["lab-6"].run("systemctl stop docker.socket docker.service")
    assert guests["lab-7"].run("systemctl is-active docker") == "active"
    own = guests["lab-7"].run("systemctl show -p MainPID --value docker")
    assert guests["lab-7"].run(f"cat /proc/{own}/comm") == "dockerd"
    guests["lab-6"].run("systemctl start docker")


def test_a_package_of_another_signer_is_refused(guests: dict[str, Guest]) -> None:
    guest, apt = guests["lab-8"], {entry["name"]: entry for entry in info()["apt"]}
    vendor = apt["lab-vendor"]
    source = "/etc/apt/sources.list.d/wrong.list"
    key = "/etc/apt/keyrings/lab-os.asc"
    guest.run(f"echo 'deb [signed-by={key}] {vendor['url']} {vendor['suite']} main' > {source}")
    output = guest.run("apt-get -q update 2>&1", check=False)
    guest.run(f"rm {source}")
    assert "NO_PUBKEY" in output or "Missing key" in output  # apt 2 and 3


def test_a_reboot_from_inside_comes_back_with_the_disk_as_it_was(guests: dict[str, Guest]) -> None:
    guest = guests["lab-7"]
    guest.run("echo kept > /var/lib/kept")
    pid = supervisor("lab-7")
    guest.reboot()
    guest.wait('test "$(systemctl is-system-running)" = running')
    assert guest.run("cat /var/lib/kept") == "kept"
    assert guest.run("systemctl is-active docker") == "active"
    assert supervisor("lab-7") == pid


def test_a_power_cut_ends_everything_at_once_and_up_boots_it_again(
    guests: dict[str, Guest],
) -> None:
    guest = guests["lab-6"]
    guest.run("echo kept > /var/lib/kept; sync")
    lab("break", "kill-guest", "lab-6")
    assert "lab-6  10.77.0.16  stopped" in lab("status")
    lab("up", "lab-6", "--engine", "none")
    guest.wait("systemctl is-active docker")
    assert guest.run("cat /var/lib/kept") == "kept"


def test_a_guest_outlives_its_killed_supervisor_and_up_takes_it_back(
    guests: dict[str, Guest],
) -> None:
    guest, before = guests["lab-8"], supervisor("lab-8")
    os.kill(before, signal.SIGKILL)
    assert "lab-8  10.77.0.18  orphan" in lab("status")
    assert guest.run("hostname") == "lab-8"
    lab("up", "lab-8", "--engine", "none")
    assert supervisor("lab-8") != before
    assert "lab-8  10.77.0.18  running" in lab("status")


def test_up_again_leaves_running_guests_alone(guests: dict[str, Guest]) -> None:
    before = {name: (guest.boot_id(), supervisor(name)) for name, guest in guests.items()}
    lab("up", *NAMES, "--engine", "none")
    assert {n: (g.boot_id(), supervisor(n)) for n, g in guests.items()} == before


def test_an_unplugged_host_does_not_answer_until_it_is_plugged_in(
    guests: dict[str, Guest],
) -> None:
    lab("break", "host-down", "lab-7")
    try:
        with pytest.raises(RuntimeError, match="lab-7"):
            guests["lab-7"].run("true", timeout_s=20)
    finally:
        lab("break", "host-down", "lab-7", "--heal")
    guests["lab-7"].wait("true", seconds=20)


def test_a_full_disk_refuses_bytes_until_it_is_healed(guests: dict[str, Guest]) -> None:
    guest = guests["lab-7"]
    lab("break", "disk-full", "lab-7")
    try:
        refused = guest.run("head -c 64M /dev/zero 2>&1 > /srv/big; rm -f /srv/big", check=False)
    finally:
        lab("break", "disk-full", "lab-7", "--heal")
    assert "No space left on device" in refused
    guest.run("head -c 64M /dev/zero > /srv/big && rm /srv/big")


def test_a_host_like_a_new_spark_lets_in_with_a_password_only(guests: dict[str, Guest]) -> None:
    lab("up", "lab-8", "--fresh", "--bootstrap-guest", "lab-8", "--engine", "none")
    entry = next(entry for entry in info()["guests"] if entry["name"] == "lab-8")
    assert entry["password"]
    with pytest.raises(RuntimeError, match="Host key verification failed"):
        guests["lab-8"].run("true")
    scanned = subprocess.run(
        ["ssh-keyscan", "-t", "ed25519", entry["ip"]], capture_output=True, text=True, check=True
    ).stdout
    assert entry["host_key"] in scanned
    offered = subprocess.run(
        ["ssh", "-i", info()["ssh"]["key"], "-o", "BatchMode=yes",
         "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
         f"spark@{entry['ip']}", "true"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Permission denied (publickey,password)" in offered.stderr


def test_down_leaves_nothing_of_a_guest_and_keeps_its_disk(guests: dict[str, Guest]) -> None:
    guests["lab-6"].run("echo kept > /var/lib/kept")
    started = time.monotonic()
    lab("down", "lab-6")
    assert time.monotonic() - started < 30
    assert traces("lab-6") == []
    assert traces("lab-7") != []
    lab("up", "lab-6", "--engine", "none")
    assert guests["lab-6"].run("cat /var/lib/kept") == "kept"
    lab("down", "lab-6", "--delete")
    assert traces("lab-6") == []
    assert not (STATE / "guests/lab-6").exists()
