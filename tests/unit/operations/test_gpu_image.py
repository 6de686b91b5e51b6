"""The image of the container check is pulled under watch: a registry that stalls is one line."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from spark_contract import tool

from spark_deploy.hosts import gpu
from spark_deploy.hosts.commands import CommandFailed
from spark_deploy.hosts.operations import Refused

IMAGE = f"nvidia/cuda@sha256:{'5' * 64}"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the host's tool would be; commands are run here."""
    path = tmp_path / "spark-host"

    def run(host: Any, command: str, *, timeout_s: int) -> list[str]:
        done = subprocess.run(
            ["sh", "-c", command], capture_output=True, text=True, timeout=10, check=False
        )
        if done.returncode != 0:
            raise CommandFailed(command, done.stdout)
        return done.stdout.splitlines()

    @contextmanager
    def silent(host: Any, what: str) -> Iterator[None]:
        yield

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu, "heartbeat", silent)
    monkeypatch.setattr(tool, "HOST_TOOL", str(path))
    return path


def saying(path: Path, script: str) -> None:
    path.write_text(f'#!/bin/sh\n[ "$*" = "image {IMAGE}" ] || exit 9\n{script}\n')
    path.chmod(0o755)


def test_what_the_pull_says_is_the_line_of_the_deploy(installed: Path) -> None:
    said = f"error: {IMAGE}: the pull stalls: nothing came in 300 s; fix: look at the registry"
    saying(installed, f"echo phase=pull bytes=5; echo '{said}' >&2; exit 1")
    with pytest.raises(Refused) as caught:
        gpu._pull(None, IMAGE)  # type: ignore[arg-type]
    told = str(caught.value)
    assert "the pull stalls: nothing came in 300 s" in told
    assert "fix: look at the registry" in told


@pytest.mark.parametrize("script", ["exit 0", "exit 2"], ids=["it is there", "earlier tools"])
def test_otherwise_the_check_goes_on(installed: Path, script: str) -> None:
    saying(installed, script)
    gpu._pull(None, IMAGE)  # type: ignore[arg-type]


def test_a_host_without_tools_is_checked_as_ever(installed: Path) -> None:
    gpu._pull(None, IMAGE)  # type: ignore[arg-type]
