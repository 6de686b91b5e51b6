"""A program in the engine's mount namespace keeps no guest disk busy."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from lab.engine import inside
from lab.paths import LabPaths
from tests.unit.prerequisites import missing


def test_unmounted_disk_is_free_while_an_engine_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        missing("mounting needs root")

    monkeypatch.setattr(LabPaths, "guests", tmp_path / "guests", raising=False)
    words: list[str] = []
    monkeypatch.setattr(os, "execvpe", lambda _, given, __: words.extend(given))
    inside.enter(tmp_path, tmp_path, ["-c", "pass"])
    # Stop before the engine's trees are mounted, and wait.
    script = words.index("-c") + 1
    words[script] = words[script].partition("root=$1")[0] + "echo in; exec sleep 60"
    image, mount_point = tmp_path / "disk.img", tmp_path / "guests/lab-1/disk"
    mount_point.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(mount_point)], check=False)
    if mounted.returncode != 0:
        missing("mount is not allowed here")
    running = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "in\n"
        subprocess.run(["umount", str(mount_point)], check=True)
        deadline = time.monotonic() + 10
        while held := subprocess.check_output(["losetup", "-j", str(image)], text=True):
            assert time.monotonic() < deadline, held
            time.sleep(0.1)
    finally:
        running.kill()
        running.communicate()
