"""GPU tests: skipped loudly without CUDA."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "files" / "image"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    reason = _missing()
    for item in items:
        if here in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_sessionfinish(session: pytest.Session) -> None:
    kept = os.environ.get("SPARK_GPU_RESULTS")
    worker = hasattr(session.config, "workerinput")  # of pytest-xdist: the others still write
    if kept and not worker and not _missing():
        from proofs import recorded

        recorded.merge(Path(kept))


@pytest.fixture(scope="session")
def trees(shared_directory: Path) -> Path:
    """All checkpoints; ``SPARK_GPU_TREES`` names those that are there already."""
    ready = os.environ.get("SPARK_GPU_TREES")
    if ready:
        return Path(ready)
    from proofs.trees import make as maker

    out, done = shared_directory / "trees", shared_directory / "trees.done"
    with (shared_directory / "trees.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one run share the trees
        if not done.exists():
            hub = os.environ.get("SPARK_GPU_HUB")
            maker.make(out, Path(hub) if hub else None, special=True)
            done.touch()
    return out


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all processes of this run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Where result files go: ``SPARK_GPU_RESULTS``, or nowhere that stays."""
    kept = os.environ.get("SPARK_GPU_RESULTS")
    return Path(kept) if kept else tmp_path / "results"


def _missing() -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return "needs a CUDA machine: torch is not installed here"
    return None if torch.cuda.is_available() else "needs a CUDA machine: torch sees no device"
