import json
from dataclasses import replace
from typing import Any

import pytest
from spark_contract.builder_api import DonorUrl
from spark_contract.documents import to_plain
from spark_contract.job import ImageProof, Job, JobState
from spark_contract.units import BOOT_LINKS

from roles import setup
from spark_deploy.config.settings.patterns import SecretRef
from spark_deploy.config.settings.sources import HubSettings
from spark_deploy.hosts import jobs
from spark_deploy.hosts.commands import ScriptResult
from spark_deploy.hosts.status import Jobs
from spark_deploy.plan.jobs import Work, checkpoint_job
from spark_deploy.plan.types import ManagedFile, PayloadIdentity
from tests.unit.operations.fake_host import FakeHost, describe, on, run_operation, unpack_sent
from tests.unit.planning.plans import plan_of

RELEASE = "main-aaaaaaaaaaaa"
TARGET = f"spark-prepare@{RELEASE}.target"
REPLACED = "spark-prepare@main-bbbbbbbbbbbb.target"
READY = "spark-prepare@main-ready.target"
UNRELATED = (READY, "spark-prepare@embed-cccccccccccc.target")
JOB = Job(
    digest="d" * 64, kind="image-build", title="build image x", argv=("true",), env={},
    proof=ImageProof("x"), total_bytes=None, after=(),
)  # fmt: skip
WORK = Work(JOB, (ManagedFile("/i", b"i"),))


def host_with(state, boot_targets, jobs_in_target=()):
    job = JobState(JOB.digest, JOB.title, JOB.kind, state, "why", None, None, None, "why", ())
    return FakeHost(
        JobStates=Jobs({JOB.digest12: job}, boot_targets, jobs_in_target), FileStates={}
    )


def wait(host, *, retire_others=True):
    return run_operation(host, jobs.wait_for_jobs, (JOB,), RELEASE, 60, retire_others)


def start(host):
    return run_operation(host, jobs.start_job, WORK, RELEASE, (JOB.digest12,))


def test_jobs_of_a_replaced_release_do_not_continue_at_boot():
    [command] = wait(host_with("done", (REPLACED, *UNRELATED)))
    assert f"multi-user.target.wants/{REPLACED}" in command
    assert f"/etc/systemd/system/{REPLACED}.d" in command
    assert not any(target in command for target in (TARGET, *UNRELATED))
    assert wait(host_with("done", (REPLACED,)), retire_others=False) == []


def test_disables_replaced_jobs_before_the_wait_and_finished_jobs_after_it():
    retire, waiting, finish = wait(host_with("running", (TARGET, REPLACED)))
    assert REPLACED in retire
    assert waiting.startswith("_wait_until_done(")
    assert TARGET in finish
    assert REPLACED not in finish


def test_release_without_jobs_reuses_the_cached_job_states():
    host = host_with("done", (READY,))
    with on(host):
        assert list(jobs.wait_for_jobs._inner((JOB,), RELEASE, 60, False)) == []
        *_, command = map(describe, jobs.wait_for_jobs._inner((), "main-ready", 60, False))
    assert host.fact_reads == 1
    assert READY in command


def built_work(locked=None):
    plan = plan_of("large", "v2").checkpoint
    assert isinstance(plan.build.donor, DonorUrl)
    build = replace(plan.build, donor=replace(plan.build.donor, sha256=locked))
    return checkpoint_job(replace(plan, build=build), JOB)


class Builders:
    def __init__(self, monkeypatch, **hashes):
        self.current = None
        monkeypatch.setattr(jobs, "current_host", lambda: self.current)
        monkeypatch.setattr(jobs, "_donor_hashes", {})
        self.hosts = [self._host(name, sha256) for name, sha256 in hashes.items()]

    def _host(self, name, sha256):
        job = built_work().job
        state = JobState(
            job.digest, job.title, job.kind, "done", "", 0, None, None, None, (), None, sha256
        )
        return FakeHost(name=name, JobStates=Jobs({job.digest12: state}), FileStates={})

    def compare(self, work):
        refused = {}
        for host in self.hosts:
            self.current = host
            run_operation(host, jobs.wait_for_jobs, (work.job,), RELEASE, 60)
        for host in self.hosts:
            text = run_operation(host, jobs.compare_donor_tensors, (work,))
            refused |= {host.name: text[0]} if text else {}
        return refused


ONE, OTHER = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("hashes", "locked", "refused"),
    [
        ((ONE, ONE), None, ""),
        ((ONE, ONE), ONE, ""),
        ((ONE, None), None, ""),
        ((ONE, OTHER), None, "xy"),
        ((ONE, OTHER), ONE, "xy"),
        ((OTHER, OTHER), ONE, "xy"),
        ((OTHER, None), ONE, "x"),
    ],
)
def test_rejects_donor_tensors_with_different_hashes(monkeypatch, hashes, locked, refused):
    problems = Builders(monkeypatch, x=hashes[0], y=hashes[1]).compare(built_work(locked))
    assert "".join(problems) == refused
    for name, text in problems.items():
        assert f"{name}: /" in text
        assert "fix: " in text


def test_wait_for_jobs_ignores_a_failed_job_of_another_release(monkeypatch):
    other = JobState(JOB.digest, "fetch", "fetch", "failed", "why", 1, None, None, None, ("why",))
    answer = ScriptResult(True, json.dumps(to_plain([other])), "")
    monkeypatch.setattr(jobs, "run_reconnecting", lambda *_: answer)
    assert jobs._wait_until_done(None, None, (), 60)


@pytest.mark.parametrize("linked", [(), UNRELATED])
def test_deploy_does_not_wait_if_all_jobs_are_done(linked):
    host = host_with("done", linked)
    assert wait(host) == []
    assert host.noops == ["1 jobs are complete"]


def test_deploy_waits_for_a_running_job_instead_of_starting_it_again():
    host = host_with("running", (TARGET,), (JOB.digest12,))
    assert start(host) == []
    assert host.noops == ["build image x: already running, attaching"]


@pytest.mark.parametrize(
    ("linked", "pulled"), [((REPLACED,), ()), ((TARGET,), ()), ((), (JOB.digest12,))]
)
def test_running_job_of_the_current_release_continues_at_boot(linked, pulled):
    *_, command = start(host_with("running", linked, pulled))
    assert f"ln -sfn /etc/systemd/system/spark-prepare@.target {BOOT_LINKS}/{TARGET}" in command
    assert "systemctl start" not in command


def test_job_in_an_unknown_state_is_not_started():
    [command] = start(host_with("unknown", ()))
    assert command.startswith("_report_failure(")
    assert "why" in command


@pytest.mark.parametrize(
    ("state", "sent"), [("waiting", True), ("failed", True), ("running", False), ("done", False)]
)
def test_hub_token_is_sent_only_to_start_jobs_and_on_standard_input(tmp_path, state, sent):
    token = "hf_canary0123456789"
    (tmp_path / "token").write_text(token)
    hub = HubSettings(token=SecretRef(file=str(tmp_path / "token")))
    host = host_with(state, (TARGET,), (JOB.digest12,))
    with on(host) as current:
        host.state = current
        commands = list(jobs.start_job._inner(replace(WORK, hub=hub), RELEASE, (JOB.digest12,)))
    text = "".join(map(str, commands)) + "".join(map(repr, commands))
    assert token not in text
    assert (f"600 /var/lib/spark/jobs/{JOB.digest12}/hub-token" in text) == sent
    assert any(f"{token}\n".encode() in unpack_sent(command) for command in commands) == sent
    for command in commands:
        if "systemctl start --no-block" not in str(command):
            assert "hub-token" not in str(command)


def test_python_packages_are_installed_before_the_host_tools(monkeypatch):
    steps: list[str] = []
    for step in ("install_tools", "install_site"):
        monkeypatch.setattr(setup, step, lambda step=step, **_: steps.append(step))
    for declare in ("expect_files", "expect_fact"):
        monkeypatch.setattr(setup, declare, lambda *_: None)
    apply: Any = setup.install_host_tools
    identity = PayloadIdentity("1" * 64, "2" * 64, "requirements.txt")
    apply._inner(identity=identity)
    assert steps == ["install_site", "install_tools"]
