"""GPU tests: skipped loudly without CUDA."""

from __future__ import annotations

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


def _missing() -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return "needs a CUDA machine: torch is not installed here"
    return None if torch.cuda.is_available() else "needs a CUDA machine: torch sees no device"
