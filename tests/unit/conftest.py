import gc

import pytest
from hypothesis import settings

from tests.judged_once import judged_once

__all__ = ["judged_once"]

# Slow examples mean a busy machine.
settings.register_profile("patient", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=10)


def pytest_configure(config: pytest.Config) -> None:
    """Use a tenth of the examples in `make check`."""
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "patient")
    # The default threshold costs a tenth of the time.
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish() -> None:
    gc.freeze()  # until the end of the session


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that tests run in this process must not patch it by gevent."""
    monkeypatch.setattr("spark_deploy.cli._uses_pyinfra", lambda *_: False)
