"""The last step of a rollout: measure the speed once under new versions, and say what it means.

It runs when the gateway is open again, so it makes no outage longer; and it undoes nothing, because
a slower server that answers right is better than none: going back is a person's choice.
"""

from __future__ import annotations

from spark_contract.serving.release import Release

from spark_host.check import measure
from spark_host.records import proof
from spark_host.rollout.ports import Host
from spark_host.rollout.record import Record
from spark_host.watch import loop


def measured(release: Release, host: Host, record: Record) -> None:
    """Measure a proven release unless that was done under these versions; keep the result."""
    kept = proof.read(release.name, host)
    if kept is None or kept.last_full is None or not proof.bench_due(release, kept):
        return
    with record.phase("bench"):
        before = proof.bench_before(release, host)
        try:
            found = host.check.speed(release, host.paths, record.report)
        except measure.NotMeasuredError as error:
            record.set(bench=(str(error),))
            return
        now = {**found, "release": release.name, "versions": kept.last_full.versions}
        result = measure.judged(release, now, before)
        proof.keep_bench(kept, result, host)
        record.set(bench=tuple(measure.sentences(result)))
        for item in result["worse"]:
            text = (
                f"{item['text']}; the way back: {' or '.join(result['way_back']) or 'none known'}"
            )
            loop.event(release, "slower", text, host.paths)
