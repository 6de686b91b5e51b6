"""Faults are planted on the same two hosts, or on a bench: one guest without a deploy."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.faults.bench import Bench, install
from tests.host.conftest import fleet
from tests.labkit import Guest, info, lab

__all__ = ["bench", "fleet"]

_BENCH = os.environ.get("SPARK_BENCH_GUEST", "lab-3")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    if os.geteuid() != 0:
        pytest.skip("the virtual lab needs root")
    lab("up", _BENCH)
    address = next(guest["ip"] for guest in info()["guests"] if guest["name"] == _BENCH)
    made = install(Guest(_BENCH, address))
    yield made
    made.wipe()
