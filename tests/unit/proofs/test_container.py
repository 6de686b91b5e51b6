"""The engine's container is reproduced from the product's ``docker run`` arguments."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from spark_contract.release import Release

from proofs import container, in_container
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.resolve import Request
from tests.unit.planning.plans import CATALOG, PAYLOAD, made_up_lock, settings_of


@pytest.fixture(scope="module")
def release() -> Release:
    settings = settings_of("large")
    lock = made_up_lock(settings, CATALOG)
    return plan_host(Request("spark-1", settings, CATALOG, lock, PAYLOAD, {})).serve


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="spark-", dir="/tmp") as folder:
        yield Path(folder)


def with_docker_arguments(release: Release, arguments: tuple[str, ...]) -> Release:
    return replace(release, engine=replace(release.engine, docker_args=arguments))


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
readable = all(folder.stat().st_mode & 0o001 for folder in Path(__file__).parents)


@needs_root
def test_unknown_docker_argument_is_rejected(release, root) -> None:
    changed = with_docker_arguments(release, (*release.engine.docker_args, "--init"))
    with pytest.raises(ValueError, match="--init"):
        container.from_release(changed, root, root)


@needs_root
@pytest.mark.parametrize("name", ["--read-only", "--network", "--cap-drop", "--security-opt"])
def test_missing_restriction_is_rejected(release, root, name: str) -> None:
    kept = [text for text in release.engine.docker_args if not text.startswith(name)]
    assert len(kept) == len(release.engine.docker_args) - 1
    with pytest.raises(ValueError, match=name):
        container.from_release(with_docker_arguments(release, tuple(kept)), root, root)


@needs_root
@pytest.mark.skipif(not readable, reason="an unnamed user cannot read this checkout")
def test_process_has_only_the_container_privileges(release, root):
    checkpoint = root / "model"
    checkpoint.mkdir()
    engine, socket = container.from_release(release, checkpoint, root)
    assert engine.argv == release.engine.argv
    assert socket.parent == Path(dict((t, s) for s, t, _ in engine.mounts)["/run/spark"])
    rights = run_probe(engine, root)
    failed = [
        claim for claim, passed in in_container.judge_rights(rights, engine).items() if not passed
    ]
    assert failed == [], rights


def run_probe(engine: container.Container, root: Path) -> dict[str, Any]:
    # The unnamed user cannot read an interpreter in a home directory.
    python = shutil.which("python3", path="/usr/bin") or sys.executable
    command = [python, "-m", "proofs.in_container"]
    process = container.start(engine, command, root, root / "log")
    output = (root / "log").read_text() if process.wait(60) == 0 else ""
    assert output, (root / "log").read_text()
    rights: dict[str, Any] = json.loads(output.splitlines()[-1])
    return rights
