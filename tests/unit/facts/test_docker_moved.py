"""Room for images is looked for where docker keeps them, wherever its owner has moved it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from spark_deploy.hosts import disk
from spark_deploy.hosts.facts import split_sections

EXPECTED = "/var/lib/docker"
# Another filesystem than that of /, on every machine.
OTHER = "/dev/shm"


def place(tmp_path: Path, **tools: str) -> disk.Place:
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    found = subprocess.run(
        ["sh", "-c", disk.disk_script([EXPECTED], [EXPECTED])],
        capture_output=True, text=True, check=False, env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    [one] = disk.parse_places(split_sections(found.stdout.splitlines())["places"])
    return one


def test_a_docker_that_was_moved_is_followed(tmp_path: Path) -> None:
    one = place(tmp_path, docker=f"echo '{OTHER}/docker|[Backing Filesystem extfs]'")
    assert (one.path, one.folder) == (EXPECTED, f"{OTHER}/docker")
    assert os.path.ismount(one.mount)
    assert one.mount == OTHER


def test_one_that_says_nothing_is_where_it_is_expected(tmp_path: Path) -> None:
    for text in ("exit 1", "echo '|'; exit 1"):
        assert place(tmp_path, docker=text).folder == EXPECTED


@pytest.mark.parametrize("dump", ['version = 2\nroot = "{}"\n', "root = '{}'\nstate = '/run/x'\n"])
def test_the_store_of_containerd_is_where_that_says(tmp_path: Path, dump: str) -> None:
    store = "driver-type io.containerd.snapshotter.v1"
    one = place(
        tmp_path,
        docker=f"echo '{EXPECTED}|[{store}]'",
        containerd=f"cat <<'E'\n{dump.format(OTHER)}\nE",
    )
    assert (one.folder, one.mount) == (OTHER, OTHER)
