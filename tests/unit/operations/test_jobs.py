"""Which work a boot goes on with: that of the present choice, and of no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from spark_contract.job import ImageProof, Job, JobState, State
from spark_contract.units import BOOT_LINKS

from spark_deploy.config.settings.secrets import SecretRef
from spark_deploy.config.settings.sources import HubSettings
from spark_deploy.hosts import jobs
from spark_deploy.hosts.status import Jobs, JobStates
from spark_deploy.plan.jobs import Work
from spark_deploy.plan.types import ManagedFile
from tests.unit.operations.test_operations import FakeHost, on, outcome, sent_files, shown

NOW, BEFORE = "main-aaaaaaaaaaaa", "main-bbbbbbbbbbbb"
TARGET = f"spark-prepare@{NOW}.target"
GIVEN_UP = f"spark-prepare@{BEFORE}.target"
OTHERS = ("spark-prepare@main-ready.target", "spark-prepare@embed-cccccccccccc.target")
JOB = Job(
    digest="d" * 64, kind="image-build", title="build image x", argv=("true",), env={},
    proof=ImageProof("x"), total_bytes=None, after=(),
)  # fmt: skip
WORK = Work(JOB, (ManagedFile("/i", b"i"),))
CANARY = "hf_canary0123456789"


def host(state: State, linked: tuple[str, ...], pulled: tuple[str, ...] = ()) -> FakeHost:
    told = JobState(JOB.digest, JOB.title, JOB.kind, state, "said", None, None, None, "said", ())
    states = {JOB.digest12: told}
    return FakeHost(JobStates=Jobs(states, linked, pulled), FileStates={})


def prepared(seen: FakeHost, *, retire_others: bool = True) -> list[str]:
    return outcome(seen, jobs.wait_for_jobs, (JOB,), NOW, 60, retire_others)


def job(seen: FakeHost) -> list[str]:
    return outcome(seen, jobs.start_job, WORK, NOW, (JOB.digest12,))


def test_work_of_a_choice_that_was_given_up_is_taken_from_the_boot() -> None:
    [command] = prepared(host("done", (GIVEN_UP, *OTHERS)))
    assert f"multi-user.target.wants/{GIVEN_UP}" in command
    assert f"/etc/systemd/system/{GIVEN_UP}.d" in command
    assert not any(target in command for target in (TARGET, *OTHERS))


def test_it_is_taken_away_before_the_wait_for_the_present_choice() -> None:
    retired, waited, own = prepared(host("running", (TARGET, GIVEN_UP)))
    assert GIVEN_UP in retired
    assert waited.startswith("_wait(")
    assert TARGET in own
    assert GIVEN_UP not in own


def test_without_jobs_what_boots_is_known_from_an_answer_that_is_still_true() -> None:
    seen = host("done", ("spark-prepare@main-ready.target",))
    with on(seen):
        assert list(jobs.wait_for_jobs._inner((JOB,), NOW, 60, False)) == []
        *_, command = map(shown, jobs.wait_for_jobs._inner((), "main-ready", 60, False))
    assert seen.asked == 1
    assert "spark-prepare@main-ready.target" in command


@pytest.mark.parametrize("linked", [(), OTHERS])
def test_nothing_is_done_when_only_what_is_wanted_boots(linked: tuple[str, ...]) -> None:
    seen = host("done", linked)
    assert prepared(seen) == []
    assert seen.noops == ["1 jobs are proven"]


def test_pairs_to_have_ready_leave_the_others_alone() -> None:
    assert prepared(host("done", (GIVEN_UP,)), retire_others=False) == []


def test_running_work_is_attached_to_when_a_boot_would_go_on_with_it() -> None:
    seen = host("running", (TARGET,), (JOB.digest12,))
    assert job(seen) == []
    assert seen.noops == ["build image x: already running, attaching"]


@pytest.mark.parametrize(
    ("linked", "pulled"), [((GIVEN_UP,), ()), ((TARGET,), ()), ((), (JOB.digest12,))]
)
def test_running_work_of_an_earlier_choice_boots_for_the_present_one(
    linked: tuple[str, ...], pulled: tuple[str, ...]
) -> None:
    *_, command = job(host("running", linked, pulled))
    assert f"ln -sfn /etc/systemd/system/spark-prepare@.target {BOOT_LINKS}/{TARGET}" in command
    assert "systemctl start" not in command


def test_work_of_unknown_state_is_neither_begun_nor_told_as_missing() -> None:
    [command] = job(host("unknown", ()))
    assert command.startswith("_refuse(")
    assert "said" in command


def test_the_host_says_what_boots_and_what_the_target_pulls_in() -> None:
    told: Any = JobStates().process(
        ["[]", f"linked {TARGET}", f"linked {GIVEN_UP}", "pulled dddddddddddd"]
    )
    assert told == Jobs({}, (TARGET, GIVEN_UP), ("dddddddddddd",))


@pytest.mark.parametrize(
    ("state", "sent"), [("waiting", True), ("failed", True), ("running", False), ("done", False)]
)
def test_a_token_travels_on_standard_input_when_work_begins_and_at_no_other_time(
    tmp_path: Path, state: State, sent: bool
) -> None:
    (tmp_path / "token").write_text(CANARY)
    hub = HubSettings(token=SecretRef(file=str(tmp_path / "token")))
    seen = host(state, (TARGET,), (JOB.digest12,))
    with on(seen) as running:
        seen.state = running
        begun = list(jobs.start_job._inner(replace(WORK, hub=hub), NOW, (JOB.digest12,)))
    text = "".join(map(str, begun)) + "".join(map(repr, begun))
    assert CANARY not in text
    assert (f"600 /var/lib/spark/jobs/{JOB.digest12}/hub-token" in text) == sent
    with_token = [command for command in begun if f"{CANARY}\n".encode() in sent_files(command)]
    assert bool(with_token) == sent
    # One command brings the token and starts the job, whose end removes it.
    starting = [one for one in begun if "systemctl start --no-block" in str(one)]
    assert all("hub-token" not in str(one) for one in begun if one not in starting)
