"""Programs that tests need: if missing, tests are skipped, but fail in CI."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Skip where a person runs the tests; where they are counted on, fail."""
    if os.environ.get("CI", "") not in ("", "false"):
        pytest.fail(what)
    pytest.skip(what)
