"""Rules for all unit tests."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

from tests.judged_once import judged_once

__all__ = ["judged_once"]

# An example that takes long says that the machine is busy, not that the code is wrong.
settings.register_profile("patient", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)


def pytest_configure(config: pytest.Config) -> None:
    """Have `make check` try a quarter of the examples that `make unit` and `make test` try."""
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "patient")
    # Looked through every 700 objects, thousands of tests cost a tenth more.
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish() -> None:
    gc.freeze()  # what was collected stays until the end


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that tests run in this process must not patch it by gevent."""
    monkeypatch.setattr("spark_deploy.cli._queries_hosts", lambda *_: False)
