"""Loop over data inside a role the way pyinfra can order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from pyinfra.context import host, inventory

from spark_deploy.planning.serving.waves import Wave

T = TypeVar("T")


def each(items: Iterable[T]) -> Iterator[T]:
    """Yield the items; pyinfra tells their operations apart by position, not by line alone.

    A plain ``for`` would pair unrelated operations of different hosts (pyinfra 3.10 identifies
    an operation by the line numbers of the call stack).
    """
    yield from host.loop(list(items))  # type: ignore[no-untyped-call]  # untyped in pyinfra


def one_by_one() -> Iterator[str]:
    """Yield this host's name when its turn comes: one operation per host, in inventory order.

    So a fault stops at the first host that it meets.
    """
    yield from (name for (name,) in in_waves((member.name,) for member in inventory))


def in_waves(waves: Iterable[Wave]) -> Iterator[Wave]:
    """Yield the wave of this host when its turn comes: one operation per wave, in their order."""
    yield from (wave for wave in each(waves) if host.name in wave)
