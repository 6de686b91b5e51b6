"""Puts the builder on the path the way a host does: by PYTHONPATH, not by installing it."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "files/contract"), str(ROOT / "files/checkpoint")]
sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402
from builder_hub import Hub  # noqa: E402
from builder_trees import Workshop  # noqa: E402


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path / "hub") as running:
        yield running
