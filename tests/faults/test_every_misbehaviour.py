"""Every fault the stub engine knows, by the host's own tools: none is ever proven."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from tests.faults.plants import BESIDE_THE_ENGINE, PLANTS
from tests.faults.stub_faults import stub_faults
from tests.faults.trial import Outcome, Trial, evidence
from tests.host.conftest import Fleet

# What a fault needs besides being switched on, so that the check meets it.
NEEDS: dict[str, dict[str, Any]] = {
    "never-ready": {"timeouts__start_s": 3},
    "unhealthy": {"timeouts__start_s": 3},
    "wedge": {"check__timeout_s": 3},
    # Enough text that the engine dies while it is read, not after the proof.
    "crash-later": {"env": {"STUB_FAULT_AFTER_S": "0.5", "STUB_PIECE_S": "0.05"}},
    # 120 tokens at 10 ms each: the limit of one check says what "too slow" is.
    "slow": {"check__timeout_s": 1, "check__copy": ["abcd" * 120]},
}
# They answer well, and are ended for the memory they take: see test_watch.py.
NOT_FOR_A_CHECK = ("leak", "greedy-load")
# A right server may show them as well.
TOLD = ("unsteady", "no-tool", "needle-lost", "some-drafts", "sampler-wrong")
NEVER_PROVEN = [one for one in stub_faults() if one not in (*NOT_FOR_A_CHECK, *TOLD)]


@pytest.fixture(scope="module")
def trials(fleet: Fleet) -> Iterator[list[Trial]]:
    fleet.settle()
    yield [Trial.on(guest) for guest in fleet.guests]
    # None of them left anything for a deploy to do.
    fleet.settle().must_have_changed_nothing()


def test_the_same_candidate_without_a_fault_is_proven(trials: list[Trial]) -> None:
    trial = trials[0]
    with trial.candidate("sound", env={}) as name:
        result = trial.change_to(name)

        assert result["state"] == "switched", result["reason"]
        assert evidence(trial.guest)["proven"] == sorted([name, trial.old])
        assert evidence(trial.guest)["boots"] == [f"spark-serve@{name}.service"]


def beside_the_engine(plant: str, trial: Trial) -> dict[str, Any]:
    """Return the values of a release that make it this plant on the host of a trial."""
    if plant == "memory that others hold":
        total_kib = int(trial.guest.run("awk '/^MemTotal:/ {print $2}' /proc/meminfo"))
        return {"memory__needed_bytes": total_kib * 1024 - (64 << 20), "memory__wait_s": 2}
    found = {}
    for path, value in PLANTS[plant].release.items():
        if isinstance(value, dict):
            found |= {f"{path}__{key}": part for key, part in value.items()}
        else:
            found[path] = value
    return found


# These stand before the tests that use all hosts at once.
@pytest.mark.parametrize("plant", BESIDE_THE_ENGINE)
def test_what_is_missing_beside_the_engine_ends_with_the_old_release(
    trials: list[Trial], plant: str, record_property: Callable[[str, object], None]
) -> None:
    trial, phase = trials[0], PLANTS[plant].phase
    changes = beside_the_engine(plant, trial)

    seen = trial.outcome(plant, env={}, **changes)

    record_property("reason", f"{seen.result['failed_phase']}: {seen.result['reason']}")
    state = "refused" if phase == "prove" else "rolled-back"
    assert (seen.result["state"], seen.result["serving"]) == (state, seen.old), seen
    assert seen.result["failed_phase"] == phase
    assert seen.after == seen.before
    assert seen.after["boots"] == seen.serving == [f"spark-serve@{seen.old}.service"]
    assert seen.answers


@pytest.mark.parametrize("fault", TOLD)
def test_what_a_right_server_may_show_is_told_and_the_change_is_done(
    trials: list[Trial], fault: str, record_property: Callable[[str, object], None]
) -> None:
    trial = trials[0]
    with trial.candidate(fault, env={"STUB_FAULT": fault}) as name:
        result = trial.change_to(name)

        record_property("warnings", result.get("warnings"))
        assert (result["state"], len(result["warnings"])) == ("switched", 1), result
        assert name in evidence(trial.guest)["proven"]


@pytest.fixture(scope="module")
def outcomes(
    trials: list[Trial], request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[Outcome]]]:
    """Try every fault that was asked for, as many at a time as there are hosts."""
    free: SimpleQueue[Trial] = SimpleQueue()
    for trial in trials:
        free.put(trial)

    def tried(fault: str) -> Outcome:
        trial = free.get()
        try:
            needs = dict(NEEDS.get(fault, {}))
            env = {"STUB_FAULT": fault, **needs.pop("env", {})}
            return trial.outcome(fault, env=env, **needs)
        finally:
            free.put(trial)

    wanted = [
        item.callspec.params["fault"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "outcomes" in item.fixturenames
    ]
    pool = ThreadPoolExecutor(len(trials))
    yield {fault: pool.submit(tried, fault) for fault in wanted}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault", NEVER_PROVEN)
def test_no_misbehaviour_is_ever_proven(
    outcomes: dict[str, Future[Outcome]], fault: str, record_property: Callable[[str, object], None]
) -> None:
    seen = outcomes[fault].result()

    record_property("reason", f"{seen.result['failed_phase']}: {seen.result['reason']}")
    assert (seen.result["state"], seen.result["serving"]) == ("rolled-back", seen.old), seen
    assert seen.result["failed_phase"] in ("start", "check")
    assert seen.after == seen.before
    assert seen.after["proven"] == [seen.old]
    assert seen.after["boots"] == seen.serving == [f"spark-serve@{seen.old}.service"]
    assert seen.answers
