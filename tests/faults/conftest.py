"""Faults are injected into the two hosts of the fleet, or into a bench guest without a deploy."""

import os
from collections.abc import Iterator

import pytest

from tests.faults.bench import Bench, install
from tests.host.conftest import fleet
from tests.labkit import guest_named, lab

__all__ = ["bench", "fleet"]

_BENCH = os.environ.get("SPARK_BENCH_GUEST", "lab-3")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    lab("up", _BENCH)
    made = install(guest_named(_BENCH))
    yield made
    made.wipe()
