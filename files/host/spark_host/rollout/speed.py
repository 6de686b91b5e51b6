"""The last step of a change: measure the speed once under new versions, and say what it means.

It runs when the gateway is open again, so it makes no outage longer; and it undoes nothing, because
a slower server that answers right is better than none: going back is a person's choice.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from spark_contract.paths import Paths
from spark_contract.release import Release

from spark_host.check import measure
from spark_host.records import proof, upgrades
from spark_host.watch import loop


class Record(Protocol):
    """What a switch writes down."""

    def set(self, **values: Any) -> None:
        """Change fields."""

    def tell(self, text: str) -> None:
        """Show what is going on."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name and time one step."""


def measured(release: Release, paths: Paths, record: Record) -> None:
    """Measure a proven release unless that was done under these versions; keep the result."""
    if release.check.bench is None or not proof.bench_due(release, paths):
        return
    with record.phase("bench"):
        before = proof.bench_before(release, paths)
        try:
            found = measure.measure(release, paths, release.check.bench.limit_s, record.tell)
        except measure.NotMeasuredError as error:
            record.set(bench=[str(error)])
            return
        kept = proof.read(release.name, paths) or {}
        now = {
            **found,
            "release": release.name,
            "versions": kept["last_full"]["versions"],
            "packages": upgrades.packages(),
        }
        result = measure.judged(release, now, before)
        proof.keep_bench(release, result, paths)
        record.set(bench=list(measure.sentences(result)))
        for item in result["worse"]:
            text = (
                f"{item['text']}; the way back: {' or '.join(result['way_back']) or 'none known'}"
            )
            loop.event(release, "slower", text, paths)
