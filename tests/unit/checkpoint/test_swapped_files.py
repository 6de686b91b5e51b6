"""What a user of the host puts in a file's place after root found it, and before root reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builder_hub import Hub, fetch_order
from builder_trees import run_tool, tool_environment

# The fetcher as it is; between its look and its reading somebody is quicker.
PROGRAM = """
import os, sys
from spark_checkpoint.__main__ import main
from spark_checkpoint.sources import fetch
look = fetch.find_candidates
def and_then(*words):
    found = look(*words)
    os.replace(sys.argv[1], sys.argv[2])
    return found
fetch.find_candidates = and_then
sys.exit(main(sys.argv[3:]))
"""
SIZE_BYTES = 300_000


def pipe(path: Path, _: bytes) -> None:
    os.mkfifo(path)


def endless(path: Path, _: bytes) -> None:
    path.symlink_to("/dev/zero")


def device(path: Path, _: bytes) -> None:
    os.mknod(path, 0o020666, os.makedev(1, 5))  # zero


def longer(path: Path, data: bytes) -> None:
    path.write_bytes(data + b"and more")


def wrong(path: Path, data: bytes) -> None:
    path.write_bytes(data[::-1])


def link(path: Path, data: bytes) -> None:
    other = path.with_name("elsewhere")
    other.write_bytes(data)
    path.symlink_to(other)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes devices")
@pytest.mark.parametrize("trap", [pipe, endless, device, longer, wrong, link])
def test_what_was_put_there_meanwhile_is_neither_waited_for_nor_taken(
    hub: Hub, tmp_path: Path, trap: Callable[[Path, bytes], None]
) -> None:
    source, home, data = hub.root / "r", tmp_path / "home", os.urandom(SIZE_BYTES)
    source.mkdir()
    home.mkdir()
    (source / "model.safetensors").write_bytes(data)
    (home / "blob").write_bytes(data)
    trap(home / ".trap", data)
    order = tmp_path / "fetch.json"
    more = {"urls": [f"{hub.url}/r"], "look_in": [str(home / "blob")]}
    order.write_text(json.dumps(fetch_order(source, tmp_path / "out", **more)))
    words = [str(home / ".trap"), str(home / "blob"), "fetch", str(order)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env=tool_environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    fetched = tmp_path / "out/model.safetensors"
    assert fetched.read_bytes() == data
    assert not fetched.is_symlink()
    assert fetched.stat().st_nlink == 1
    assert run_tool("verify", tmp_path / "out", "--full").returncode == 0
