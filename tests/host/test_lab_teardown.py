"""A second, isolated lab is started, killed and removed.

It has separate network and mount namespaces, state directory and cgroup, so that the shared lab can
stay in use.
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
    def __init__(self, namespace: subprocess.Popen[bytes]):
        self.enter = ["nsenter", "-t", str(namespace.pid), "-n", "-m", "--"]
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

    def output_of(self, *argv: str) -> str:
        return subprocess.run(
            [*self.enter, *argv], capture_output=True, text=True, check=True
        ).stdout

    def leftovers(self) -> list[str]:
        lines = [line for line in self.output_of("ip", "-br", "link").splitlines() if "lab" in line]
        lines += self.output_of("ip", "netns").splitlines()
        mounts = self.output_of("cat", "/proc/mounts").splitlines()
        lines += [line for line in mounts if f"{SECOND_STATE}/" in line]
        loops = self.output_of("losetup", "-l", "-n", "-O", "BACK-FILE").splitlines()
        lines += [line for line in loops if line.startswith(f"{SECOND_STATE}/")]
        lines += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{CGROUP}")]
        lines += [str(path) for path in Path("/sys/fs/cgroup").glob(CGROUP)]
        return lines

    def host_names(self) -> list[str]:
        record = json.loads((SECOND_STATE / "lab.json").read_text())
        ssh = record["ssh"]
        return [
            self.output_of(
                "ssh", "-i", ssh["key"], "-o", f"UserKnownHostsFile={ssh['known_hosts']}",
                "-o", "BatchMode=yes", f"{ssh['user']}@{guest['ip']}", "hostname",
            ).strip()
            for guest in record["guests"]
        ]  # fmt: skip


@pytest.fixture
def second() -> Iterator[SecondLab]:
    lab("prepare", "--engine", "none")
    copy_cache()
    script = "mkdir -p /run/netns; mount -t tmpfs t /run/netns; ip link set lo up; sleep infinity"
    namespace = subprocess.Popen(
        ["unshare", "-n", "-m", "sh", "-c", f"{script} & wait"], start_new_session=True
    )
    time.sleep(0.5)
    running = SecondLab(namespace)
    yield running
    running.run("down", "--delete")
    os.killpg(namespace.pid, signal.SIGKILL)
    namespace.wait()
    shutil.rmtree(SECOND_STATE)


def copy_cache(
    state: Path = SECOND_STATE, enter: Sequence[str] = (), *, copied: bool = False
) -> None:
    target = state / "cache"
    subprocess.run([*enter, "mkdir", "-p", str(target)], check=True)
    pieces = [str(path) for name in PIECES for path in (STATE / "cache").glob(name)]
    how = "-a" if copied else "-al"  # hard links, unless it is another filesystem
    subprocess.run([*enter, "cp", how, *pieces, str(target)], check=True)


def test_down_leaves_nothing(second: SecondLab) -> None:
    second.run("up", "3", "--engine", "none")
    assert second.host_names() == ["lab-1", "lab-2", "lab-3"]
    for name in ("lab-1", "lab-2", "lab-3"):
        second.run("break", "reboot", name)
    time.sleep(1)
    second.run("up", "3", "--engine", "none")
    assert second.host_names() == ["lab-1", "lab-2", "lab-3"]
    assert len(second.leftovers()) > 10
    second.run("down")
    assert second.leftovers() == []


def test_up_and_down_after_every_process_was_killed(
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
    assert second.host_names() == ["lab-1", "lab-2"]
    os.kill(int((SECOND_STATE / "guests/lab-1/supervisor.pid").read_text()), signal.SIGKILL)
    second.run("down")
    assert second.leftovers() == []


def test_purge_frees_every_byte_and_keeps_the_other_lab(second: SecondLab) -> None:
    shutil.rmtree(SECOND_STATE)
    image = SECOND_STATE.with_suffix(".ext4")
    image.touch()
    os.truncate(image, 8 * 10**9)
    SECOND_STATE.mkdir()
    second.output_of("mkfs.ext4", "-q", str(image))
    second.output_of("mount", "-o", "loop", str(image), str(SECOND_STATE))
    second.env["SPARK_LAB_DIR"] = f"{SECOND_STATE}/lab"

    def used_bytes() -> int:
        shown = second.output_of("df", "--output=used", "-B1", str(SECOND_STATE))
        return int(shown.split()[-1])

    try:
        other_guests, before = guests_of_the_shared_lab(), used_bytes()
        copy_cache(SECOND_STATE / "lab", enter=second.enter, copied=True)
        second.run("up", "1", "--engine", "none")
        used = used_bytes() - before
        output = second.run("down", "--purge")
        freed = re.search(r"([\d.]+) GB", output)
        assert freed is not None, output
        assert float(freed[1]) == pytest.approx(used / 1e9, abs=0.1)
        assert used > 5 * 10**8
        assert used_bytes() - before < 10**6  # a once long folder keeps blocks
        assert second.leftovers() == []
        assert guests_of_the_shared_lab() == other_guests
    finally:
        second.run("down", "--purge")
        second.output_of("umount", str(SECOND_STATE))
        image.unlink()


def guests_of_the_shared_lab() -> set[str]:
    return {path.name for path in (STATE / "guests").iterdir()}


def test_next_up_finishes_killed_up(second: SecondLab) -> None:
    for after_s in (0.3, 0.6, 0.9, 1.3, 1.8, 2.5):
        killed = second.start("up", "2", "--fresh", "--engine", "none")
        time.sleep(after_s)
        killed.kill()
        killed.wait()
        second.run("up", "2", "--engine", "none")
        assert second.host_names() == ["lab-1", "lab-2"], f"killed after {after_s} s"
