"""``up``: what it says of each host before it changes anything."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from spark_contract.job import JobState, Progress
from spark_contract.records import Rollout
from spark_contract.tool import COMPILING

from spark_deploy.cli import up
from spark_deploy.cli.query_hosts import Answer
from spark_deploy.cli.up import Found, sentence
from spark_deploy.hosts.payload import read_payload
from spark_deploy.hosts.status import HostStatus, Jobs, JobStates, Status
from spark_deploy.plan.jobs import jobs_of
from tests.unit.planning.plans import plan_of
from tests.unit.statuses import told

OLD = "main-aaaaaaaaaaaa"


def document(active: str | None, profile: str = "v2") -> dict:
    """Return what the tools of a host say that serves one release, or none."""
    release = {
        "name": OLD, "model": "large", "profile": profile, "names": ["large"], "restarts": 0,
        "proof": None, "speed": [],
    }  # fmt: skip
    service = {
        "good": active, "enabled": [active] if active else [], "active": active,
        "stopped_by_hand": None, "traffic_open": True, "gateway": {"active": "active"},
    }  # fmt: skip
    return {
        "releases": [release], "services": {"main": service}, "jobs": [], "reboot_pending": "",
        "memory": {"total_bytes": 1, "available_bytes": 1}, "live": None, "events": {},
    }  # fmt: skip


def states(plan, state: str, fetched_bytes: int = 0) -> Jobs:
    works = jobs_of(plan, read_payload().image_context)
    progress = Progress("download", fetched_bytes, None, None, None)
    return Jobs(
        {
            work.job.digest12: JobState(
                work.job.digest12, work.job.title, work.job.kind, state, "", None, None,
                progress, None, (),
            )
            for work in works
        }
    )  # fmt: skip


def said(found: HostStatus, jobs: Jobs | None = None, last: Rollout | None = None) -> str:
    plan = plan_of("large", "v2")
    answer = Answer(SimpleNamespace(name="spark-1"), Found(found, jobs or Jobs({}), last))
    return sentence(plan, answer)["text"]


def test_a_new_host_is_told_what_it_fetches():
    text = said(HostStatus(None))
    assert text.startswith("new here: will serve large with v2; fetches ")
    assert "an image of" in text
    assert "builds the checkpoint" in text
    assert "no figure yet of how long that takes" in text
    assert text.endswith(COMPILING)


def test_a_change_of_profile_says_how_long_clients_wait():
    times = {"drain": 3.0, "stop": 10.0, "memory": 2.0, "start": 300.0, "check": 28.0}
    last = Rollout(OLD, times_s=times)
    text = said(told(document(OLD, "agent")), states(plan_of("large", "v2"), "done"), last)
    assert text == (
        "agent → v2 (large); nothing to download; engine restarts; clients get 503 for "
        f"about 6 minutes (the last start took 5:40); plus {COMPILING}"
    )


@pytest.mark.parametrize(("name", "compiles"), [(OLD, False), ("embed-aaaaaaaaaaaa", True)])
def test_a_cache_that_a_proven_release_of_the_service_left_saves_the_compilation(name, compiles):
    found = document(OLD, "agent")
    warm = {**found["releases"][0], "name": name, "cache": plan_of("large", "v2").cache_dir}
    found["releases"].append(warm)
    assert said(told(found)).endswith(COMPILING) is compiles


def test_a_rollout_that_is_under_way_is_attached_to_or_refuses_another():
    there = {"release": OLD, "since": "2026-11-21T10:00:00Z", "phase": "start"}
    found = document(None, "agent")
    found["services"]["main"]["rollout"] = there
    going = "rollout of large with agent is under way since 2026-11-21T10:00:00Z (engine loads)"
    assert said(told(found)) == (
        f"{going}; until it ends a change to large with v2 is refused: run again then"
    )
    there["release"] = found["releases"][0]["name"] = plan_of("large", "v2").serve.name
    assert said(told(found)).endswith("is under way since 2026-11-21T10:00:00Z (engine loads); "
                                      "this run attaches to it")  # fmt: skip


def test_a_start_is_only_called_the_first_where_there_was_none_before():
    plan = plan_of("large", "v2")
    found = document(None)
    found["releases"][0]["name"] = plan.serve.name
    took = Rollout(plan.serve.name, state="switched", times_s={"start": 70.0})
    failed = Rollout(plan.serve.name, state="rolled-back", times_s={"start": 70.0})
    done = states(plan, "done")
    found["releases"][0]["cache"] = plan.cache_dir
    assert said(told(found), done, took).endswith(
        "then the engine starts, which takes about a minute (the last start took 1:10)"
    )
    assert said(told(found), done, failed).endswith("for the first time: no figure yet of how "
                                                    "long that takes")  # fmt: skip
    found["releases"][0]["proof"] = {}
    assert said(told(found), done).endswith("again: how long that took is not kept")


@pytest.mark.parametrize("active", [None, OLD])
def test_the_last_start_is_asked_of_what_served_before_and_else_of_what_is_to_serve(active):
    asked = []

    def ask(found: HostStatus) -> Found:
        def run(line: str, **_: object) -> tuple[bool, SimpleNamespace]:
            asked.append(line)
            return False, SimpleNamespace(stdout="")

        facts = {Status: found, JobStates: Jobs({})}
        host = SimpleNamespace(
            get_fact=lambda fact, **_: facts[fact], run_shell_command=run, data={}
        )
        return up._ask(host, plan_of("large", "v2"))

    assert ask(told(document(active))).last is None
    assert asked[0].endswith(active or plan_of("large", "v2").serve.name)
    ask(HostStatus(None))
    assert len(asked) == 1


def test_services_beside_the_main_one_are_told_as_well(monkeypatch):
    monkeypatch.setattr(HostStatus, "unproven", lambda _self, name, _release: name != "main")
    plan = plan_of("large", "v2")
    other = replace(plan, serve=replace(plan.serve, name="small-1", service="small"))
    found = document(OLD)
    found["services"]["gone"] = {**found["services"]["main"], "enabled": ["gone-1"]}
    answer = Answer(SimpleNamespace(name="a"), Found(told(found), Jobs({}), None))
    told_of = sentence(replace(plan, services=(other,)), answer)
    assert told_of["changes"]
    assert told_of["text"].split("; ")[1:] == [
        "nothing of it changes",
        "service small: will serve large with v2",
        "service gone: is listed no more and stops",
    ]


def test_what_a_job_has_already_is_not_counted_again():
    plan = plan_of("large", "v2")
    whole = said(told(document(None)), states(plan, "waiting"))
    part = said(told(document(None)), states(plan, "running", fetched_bytes=10**12))
    assert " GB of files" in whole
    assert "of files" not in part


def test_a_host_that_serves_its_plan_has_nothing_to_change(monkeypatch):
    monkeypatch.setattr(HostStatus, "unproven", lambda *_: "")
    answer = Answer(SimpleNamespace(name="a"), Found(told(document(OLD)), Jobs({}), None))
    found = sentence(plan_of("large", "v2"), answer)
    assert (found["text"], found["changes"]) == (
        "large with v2 is served and proven; nothing of it changes", False,
    )  # fmt: skip
