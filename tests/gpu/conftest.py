"""GPU tests: skipped loudly without CUDA."""

from __future__ import annotations

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


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All checkpoints; ``SPARK_GPU_TREES`` names those that are there already."""
    ready = os.environ.get("SPARK_GPU_TREES")
    if ready:
        return Path(ready)
    from tests.gpu import trees as maker

    out = tmp_path_factory.mktemp("trees") / "all"
    hub = os.environ.get("SPARK_GPU_HUB")
    maker.make(out, Path(hub) if hub else None, special=True)
    return out


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
