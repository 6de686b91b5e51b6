from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from tests.faults.stub_faults import stub_faults
from tests.faults.trial import Trial, evidence

NEEDS: dict[str, dict[str, Any]] = {
    "never-ready": {"timeouts__start_s": 3},
    "unhealthy": {"timeouts__start_s": 3},
    "wedge": {"check__timeout_s": 3},
    "crash-later": {"env": {"STUB_FAULT_AFTER_S": "0.5", "STUB_PIECE_S": "0.05"}},
    "slow": {"check__timeout_s": 1, "check__copy": ["abcd" * 120]},
}
NOT_FOR_A_CHECK = ("leak", "greedy-load")
# A correct server may behave like this.
WARNINGS = ("unsteady", "no-tool", "needle-lost", "some-drafts", "sampler-wrong")
NEVER_PROVEN = [fault for fault in stub_faults() if fault not in (*NOT_FOR_A_CHECK, *WARNINGS)]


@pytest.fixture(scope="module")
def trials(fleet):
    fleet.settle()
    yield [Trial.on(guest) for guest in fleet.guests]
    fleet.settle().assert_unchanged()


def test_candidate_without_fault_passes_its_check(trials):
    trial = trials[0]
    with trial.candidate("sound", env={}) as name:
        result = trial.change_to(name)

        assert result["state"] == "switched", result["reason"]
        assert evidence(trial.guest)["proven"] == sorted([name, trial.old])
        assert evidence(trial.guest)["boots"] == [f"spark-serve@{name}.service"]


@pytest.mark.parametrize("fault", WARNINGS)
def test_candidate_with_minor_fault_passes_with_one_warning(trials, fault, record_property):
    trial = trials[0]
    with trial.candidate(fault, env={"STUB_FAULT": fault}) as name:
        result = trial.change_to(name)

        record_property("warnings", result.get("warnings"))
        assert (result["state"], len(result["warnings"])) == ("switched", 1), result
        assert name in evidence(trial.guest)["proven"]


@pytest.fixture(scope="module")
def outcomes(trials, request):
    free: SimpleQueue[Trial] = SimpleQueue()
    for trial in trials:
        free.put(trial)

    def run_trial(fault):
        trial = free.get()
        try:
            needs = dict(NEEDS.get(fault, {}))
            env = {"STUB_FAULT": fault, **needs.pop("env", {})}
            return trial.outcome(fault, env=env, **needs)
        finally:
            free.put(trial)

    requested = [
        str(item.callspec.params["fault"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and "outcomes" in item.fixturenames
    ]
    pool = ThreadPoolExecutor(len(trials))
    yield {fault: pool.submit(run_trial, fault) for fault in requested}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault", NEVER_PROVEN)
def test_candidate_with_fault_is_rolled_back(outcomes, fault, record_property):
    outcome = outcomes[fault].result()

    record_property("reason", f"{outcome.result['failed_phase']}: {outcome.result['reason']}")
    assert (outcome.result["state"], outcome.result["serving"]) == ("rolled-back", outcome.old)
    assert outcome.result["failed_phase"] in ("start", "check")
    assert outcome.after == outcome.before
    assert outcome.after["proven"] == [outcome.old]
    assert outcome.after["boots"] == outcome.serving == [f"spark-serve@{outcome.old}.service"]
    assert outcome.answers
