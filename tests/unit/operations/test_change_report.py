"""How a change of release ended, as people read it."""

from __future__ import annotations

from typing import Any

import pytest
from spark_contract.records import Rollout

from spark_deploy.hosts import releases
from tests.unit.operations.test_operations import FakeHost

NEW, OLD = "main-bbbbbbbbbbbb", "main-aaaaaaaaaaaa"


def said(**result: Any) -> tuple[bool, list[str]]:
    host = FakeHost({})
    well = releases.report_change(host, NEW, Rollout(NEW, **result))  # type: ignore[arg-type]
    return well, "\n".join(host.logs).splitlines()


@pytest.mark.parametrize(
    ("state", "serving", "now", "kept"),
    [
        ("rolled-back", OLD, OLD, "; the current release keeps serving"),
        ("failed-no-previous", None, "nothing", ""),
        ("rollback-failed", None, "nothing", ""),
    ],
)
def test_a_failed_change_shows_the_end_of_the_log_the_reason_and_what_serves_now(
    state: str, serving: str | None, now: str, kept: str
) -> None:
    tail = ["loading", "ERROR Free memory on device cuda:0"]
    assert said(
        state=state,
        serving=serving,
        log_tail=tail,
        failed_phase="start",
        reason="did not start",
        ended_at="2026-01-01T00:00:00Z",
    ) == (
        False,
        [
            "  loading",
            "  ERROR Free memory on device cuda:0",
            f"{NEW}: {state} in phase start: did not start",
            f"  now serving: {now}",
            f"  fix: correct the cause above and run again{kept}",
        ],
    )


def test_an_interrupted_change_does_not_claim_that_nothing_serves() -> None:
    well, lines = said(state="interrupted", phase="start", failed_phase=None, reason=None)
    assert not well
    assert lines[:2] == [
        f"{NEW}: interrupted in phase start: it was interrupted",
        "  now serving: not known from this change; `spark-deploy status` reads it from the host",
    ]


def test_a_change_that_went_well_tells_what_its_check_warned_of() -> None:
    well, lines = said(state="switched", serving=NEW, warnings=("repeat: two texts",))
    assert (well, lines[1:]) == (True, ["check warning: repeat: two texts"])


def test_a_change_that_went_well_tells_its_times_and_its_speed() -> None:
    times, bench = {"start": 61.25, "check": 3.0}, ["speed: 30.1 tokens/s", "slower than before"]
    assert said(state="switched", serving=NEW, times_s=times, bench=bench) == (
        True,
        [f"serves {NEW} (start 61.2 s, check 3.0 s)", *bench],
    )
