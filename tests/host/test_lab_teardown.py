"""A whole lab is brought up, killed and taken down, beside the one that other tests use.

It lives in a network and a mount namespace of its own, with its own state directory and cgroup,
so that its bridge and addresses are nobody else's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.labkit import CHECKOUT, STATE, lab

SECOND_STATE = STATE.with_name(f"{STATE.name}-second")
CGROUP = "lab-second"
PIECES = ("bootstrap-*", "debs-*", "debootstrap-debs-*", "stubs", "base-*")


class SecondLab:
    def __init__(self, holder: subprocess.Popen[bytes]):
        self.enter = ["nsenter", "-t", str(holder.pid), "-n", "-m", "--"]
        self.env = {
            **os.environ,
            "PYTHONPATH": str(CHECKOUT),  # nsenter leaves the working directory
            "SPARK_LAB_DIR": str(SECOND_STATE),
            "SPARK_LAB_CGROUP": CGROUP,
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.enter, sys.executable, "-m", "lab", *words],
            env=self.env, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *words: str) -> str:
        process = self.start(*words)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return output

    def look(self, *argv: str) -> str:
        return subprocess.run(
            [*self.enter, *argv], capture_output=True, text=True, check=True
        ).stdout

    def traces(self) -> list[str]:
        """What is left of it, by tools the lab does not use for cleaning."""
        lines = [line for line in self.look("ip", "-br", "link").splitlines() if "lab" in line]
        lines += self.look("ip", "netns").splitlines()
        mounts = self.look("cat", "/proc/mounts").splitlines()
        lines += [line for line in mounts if f"{SECOND_STATE}/" in line]
        loops = self.look("losetup", "-l", "-n", "-O", "BACK-FILE").splitlines()
        lines += [line for line in loops if line.startswith(f"{SECOND_STATE}/")]
        lines += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{CGROUP}")]
        lines += [str(path) for path in Path("/sys/fs/cgroup").glob(CGROUP)]
        return lines

    def reachable(self) -> list[str]:
        """Names that the guests themselves give over SSH."""
        record = json.loads((SECOND_STATE / "lab.json").read_text())
        ssh = record["ssh"]
        return [
            self.look(
                "ssh", "-i", ssh["key"], "-o", f"UserKnownHostsFile={ssh['known_hosts']}",
                "-o", "BatchMode=yes", f"{ssh['user']}@{guest['ip']}", "hostname",
            ).strip()
            for guest in record["guests"]
        ]  # fmt: skip


@pytest.fixture
def second() -> Iterator[SecondLab]:
    lab("prepare", "--engine", "none")
    share_cache()
    script = "mkdir -p /run/netns; mount -t tmpfs t /run/netns; ip link set lo up; sleep infinity"
    holder = subprocess.Popen(
        ["unshare", "-n", "-m", "sh", "-c", f"{script} & wait"], start_new_session=True
    )
    time.sleep(0.5)
    running = SecondLab(holder)
    yield running
    running.run("down", "--delete")
    os.killpg(holder.pid, signal.SIGKILL)
    holder.wait()
    shutil.rmtree(SECOND_STATE)


def share_cache(
    state: Path = SECOND_STATE, enter: Sequence[str] = (), *, copied: bool = False
) -> None:
    """Hard-link the heavy pieces: nothing is bootstrapped twice for this test."""
    target = state / "cache"
    subprocess.run([*enter, "mkdir", "-p", str(target)], check=True)
    pieces = [str(path) for name in PIECES for path in (STATE / "cache").glob(name)]
    how = "-a" if copied else "-al"  # a copy where it is another filesystem
    subprocess.run([*enter, "cp", how, *pieces, str(target)], check=True)


def test_three_hosts_reboot_and_a_lab_that_is_down_leaves_nothing(second: SecondLab) -> None:
    second.run("up", "3", "--engine", "none")
    assert second.reachable() == ["lab-1", "lab-2", "lab-3"]
    for name in ("lab-1", "lab-2", "lab-3"):
        second.run("break", "reboot", name)
    time.sleep(1)
    second.run("up", "3", "--engine", "none")
    assert second.reachable() == ["lab-1", "lab-2", "lab-3"]
    assert len(second.traces()) > 10
    second.run("down")
    assert second.traces() == []


def test_everything_killed_at_once_is_cleaned_by_down_and_taken_up_again(
    second: SecondLab,
) -> None:
    second.run("up", "2", "--engine", "none")
    for name in ("lab-1", "lab-2"):
        pid = int((SECOND_STATE / "guests" / name / "supervisor.pid").read_text())
        os.kill(pid, signal.SIGKILL)
    for server in ("hub", "packages", "registry"):
        os.kill(int((SECOND_STATE / "run" / f"{server}.pid").read_text()), signal.SIGKILL)
    assert second.run("status").count("orphan") == 2
    second.run("up", "2", "--engine", "none")
    assert second.reachable() == ["lab-1", "lab-2"]
    os.kill(int((SECOND_STATE / "guests/lab-1/supervisor.pid").read_text()), signal.SIGKILL)
    second.run("down")
    assert second.traces() == []


def test_a_purge_gives_every_byte_back_and_leaves_the_other_lab_alone(second: SecondLab) -> None:
    """On a filesystem of its own, for on a shared one others write as well."""
    shutil.rmtree(SECOND_STATE)
    image = SECOND_STATE.with_suffix(".ext4")
    image.touch()
    os.truncate(image, 8 * 10**9)
    SECOND_STATE.mkdir()
    second.look("mkfs.ext4", "-q", str(image))
    second.look("mount", "-o", "loop", str(image), str(SECOND_STATE))
    second.env["SPARK_LAB_DIR"] = f"{SECOND_STATE}/lab"

    def used_bytes() -> int:
        said = second.look("df", "--output=used", "-B1", str(SECOND_STATE))
        return int(said.split()[-1])

    try:
        others, before = guests_of_the_shared_lab(), used_bytes()
        share_cache(SECOND_STATE / "lab", enter=second.enter, copied=True)
        second.run("up", "1", "--engine", "none")
        taken = used_bytes() - before
        said = second.run("down", "--purge")
        told = re.search(rf"([\d.]+) GB given back: {SECOND_STATE}/lab is gone", said)
        assert told is not None, said
        assert float(told[1]) == pytest.approx(taken / 1e9, abs=0.1)
        assert taken > 5 * 10**8
        assert used_bytes() - before < 10**6  # a folder that once was long keeps its blocks
        assert second.traces() == []
        assert guests_of_the_shared_lab() == others
    finally:
        second.run("down", "--purge")
        second.look("umount", str(SECOND_STATE))
        image.unlink()


def guests_of_the_shared_lab() -> set[str]:
    return {path.name for path in (STATE / "guests").iterdir()}


def test_an_up_killed_at_any_moment_is_finished_by_the_next(second: SecondLab) -> None:
    for after_s in (0.3, 0.6, 0.9, 1.3, 1.8, 2.5):
        killed = second.start("up", "2", "--fresh", "--engine", "none")
        time.sleep(after_s)
        killed.kill()
        killed.wait()
        second.run("up", "2", "--engine", "none")
        assert second.reachable() == ["lab-1", "lab-2"], f"killed after {after_s} s"
