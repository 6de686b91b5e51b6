"""Clients keep sending requests while the profile changes and changes back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tests.clients import assert_short_waits, clients, outages_s, overhead_s
from tests.host.conftest import Fleet
from tests.traces import state


def test_clients_get_no_wrong_answer_during_round_trip(
    fleet: Fleet, record_property: Callable[[str, object], None]
) -> None:
    fleet.settle(profile="v2-tq")
    fleet.settle()
    guest = fleet.guests[0]
    first, before = guest.release(), state(guest)

    with clients(guest, guest.names()[0]) as answers:
        runs, times = [], []
        for profile in ("v2-tq", "v2"):
            fleet.site.choose(profile=profile)
            runs.append(fleet.site.deploy("--limit", guest.name))
            parts = guest.json(f"cat /var/lib/spark/switch/{guest.release()}.json")["times_s"]
            record_property(f"outage_s to {profile}", json.dumps(parts))
            times.append(parts)
            assert set(parts) >= {"drain", "stop", "memory", "start", "check", "open", "enable"}
            assert overhead_s(parts) < 5.0, parts

    assert [run.exit_code for run in runs] == [0, 0], runs[-1].stderr[-3000:]
    for run in runs:
        shown = re.findall(r"\b(drain|stop|memory|start|check) \d+\.\d s", run.stderr)
        assert set(shown) == {"drain", "stop", "memory", "start", "check"}, run.stderr[-3000:]
    assert {answer.kind for answer in answers} == {"right", "refused"}, [
        answer.text for answer in answers if answer.kind == "other"
    ]
    outages = outages_s(answers)
    record_property("outage_s by the clients", json.dumps(outages))
    assert len(outages) == 2
    for parts, outage_s in zip(times, outages, strict=True):
        assert_short_waits(parts, outage_s)
    assert (guest.release(), state(guest)) == (first, before)
    fleet.site.deploy().assert_unchanged()
