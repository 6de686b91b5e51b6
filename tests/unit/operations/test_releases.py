"""Going back and pruning: what they say, what they do, and when they leave a host alone."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from spark_contract.documents import read, text_of
from spark_contract.records import Rollout
from spark_contract.status import Keep, Pruning
from spark_contract.tool import HOST_TOOL

from spark_deploy.hosts import releases, serve
from spark_deploy.hosts.status import Prunable, WayBack
from spark_deploy.hosts.uninstall import prune_host
from tests.unit.facts.test_serve_status import RELEASE, RIGHT
from tests.unit.operations.test_operations import FakeHost, on, outcome
from tests.unit.statuses import told

A = {"name": "main-aaaaaaaaaaaa", "model": "m", "profile": "v2"}
B = {"name": "main-bbbbbbbbbbbb", "model": "m", "profile": "v2-tq"}
KEEP = Keep(2, frozenset(), frozenset(), frozenset(), "/m", "/s", "/c")


def way(answer: dict[str, Any]) -> Any:
    return WayBack().process([json.dumps(answer)])


def back(answer: dict[str, Any], **more: Any) -> tuple[FakeHost, list[str]]:
    host = FakeHost(WayBack=way(answer))
    for name, value in more.items():
        setattr(host.state, name, value)
    return host, outcome(host, releases.roll_back, "main", None, 60)


def test_a_rollback_is_one_command_to_the_named_release() -> None:
    _, commands = back({"from": B, "to": A})
    assert commands == [f"_begin_and_watch({HOST_TOOL} rollback main --to main-aaaaaaaaaaaa, 60)"]


def test_a_dry_rollback_says_from_where_to_where() -> None:
    host = FakeHost(WayBack=way({"from": B, "to": A}))
    commands = outcome(host, releases.roll_back, "main", None, 60, executing=False)
    assert len(commands) == 1
    assert host.logs == [
        "goes back from main-bbbbbbbbbbbb (m with v2-tq) to main-aaaaaaaaaaaa (m with v2)"
    ]


def test_a_rollback_that_is_done_does_nothing() -> None:
    host, commands = back({"from": A, "to": A, "done": "A serves in place of B"})
    assert (commands, host.noops) == ([], ["A serves in place of B"])


def test_a_rollback_that_cannot_be_done_fails_with_the_hosts_words() -> None:
    problem = {"where": "main", "what": "nothing to go back to", "fix": "change group_vars"}
    _, [command] = back({"from": A, "to": None, "problem": problem})
    assert command.startswith("_refuse(main: nothing to go back to")


def test_a_dry_rollback_that_will_be_refused_says_why_and_predicts_no_change() -> None:
    problem = {"where": "main", "what": "was stopped on purpose", "fix": "start it first"}
    host = FakeHost(WayBack=way({"from": A, "to": None, "problem": problem}))
    assert outcome(host, releases.roll_back, "main", None, 60, executing=False) == []
    assert host.logs == ["main: was stopped on purpose", "  fix: start it first"]
    assert host.noops == ["refused"]


def test_a_host_with_older_tools_is_told_to_deploy_first() -> None:
    [command] = outcome(FakeHost(WayBack=WayBack.default()), releases.roll_back, "main", None, 60)
    assert command.startswith("_refuse(")
    assert "run deploy.py for this host first" in command


MALFORMED = (
    "error: /etc/spark/releases/main-aaaaaaaaaaaa/release.json: malformed: KeyError: 'image'; "
    "fix: run the deploy for this host again"
)


@pytest.mark.parametrize(
    ("fact", "operation", "arguments"),
    [(WayBack, releases.roll_back, ("main", None, 60)), (Prunable, prune_host, (KEEP,))],
)
def test_what_the_host_tools_refuse_is_told_in_their_words(
    fact: Any, operation: Any, arguments: tuple[Any, ...]
) -> None:
    host = FakeHost(**{fact.__name__: fact().process(["phase=x", MALFORMED])})
    [command] = outcome(host, operation, *arguments)
    assert command.startswith("_refuse(/etc/spark/releases/main-aaaaaaaaaaaa/release.json: malf")
    assert "fix: run the deploy for this host again" in command


def test_tools_that_do_not_know_a_verb_give_no_answer() -> None:
    usage = ["spark-host status [--live]: everything", "spark-host check [RELEASE]: prove"]
    for fact in (WayBack(), Prunable()):
        assert fact.process(usage) == fact.process([]) == fact.default()
        assert "older than this checkout" in str(fact.default())


def test_a_failure_elsewhere_leaves_this_host_alone() -> None:
    other = FakeHost()
    other.name = "spark-0"
    results = {other: SimpleNamespace(error_ops={"op"})}
    _, [command] = back({"from": B, "to": A}, inventory=[other], results=results)
    assert "left alone on main-bbbbbbbbbbbb (m with v2-tq), because spark-0 failed first" in command


def test_after_a_rollback_the_run_is_red_unless_what_serves_is_proven() -> None:
    good = FakeHost(Status=told(RIGHT))
    assert outcome(good, releases.verify_rollback, "main", "m/v2-tq") == []

    closed = {**RIGHT["services"]["main"], "traffic_open": False}
    bad = FakeHost(Status=told({**RIGHT, "services": {"main": closed}}))
    [command] = outcome(bad, releases.verify_rollback, "main", "m/v2-tq")
    assert "gateway is closed" in command


FOUND = {
    "items": [
        {"kind": "release", "name": "main-cccccccccccc", "bytes": 0},
        {"kind": "tree", "name": "/srv/spark/models/x", "bytes": 7_250_000_000},
        {"kind": "job", "name": "0" * 12, "bytes": 0},
    ],
    "bytes": 7_250_000_000,
    "kept": {"main-aaaaaaaaaaaa": "serves"},
    "not_ours": ["/srv/spark/models/mine"],
    "problems": [],
}


@pytest.mark.parametrize("executing", [False, True])
def test_a_prune_says_each_thing_with_its_bytes_once(executing: bool) -> None:
    host = FakeHost(Prunable=read(Pruning, FOUND))
    commands = outcome(host, prune_host, KEEP, executing=executing)
    text = "\n".join(host.logs)
    assert len(commands) == 1
    outcome(host, prune_host, KEEP)
    assert "\n".join(host.logs) == text
    assert "7.25 GB  tree /srv/spark/models/x" in text
    assert "release main-aaaaaaaaaaaa: serves" in text
    assert "/srv/spark/models/mine: unmanaged" in text
    assert "state files of 1 jobs" in text


def test_a_prune_with_nothing_to_do_does_nothing() -> None:
    host = FakeHost(Prunable=read(Pruning, {**FOUND, "items": [], "bytes": 0}))
    assert outcome(host, prune_host, KEEP) == []
    assert host.noops == ["nothing to remove"]


@pytest.mark.parametrize(
    ("chosen", "then"),
    [
        ("m/v2-tq", "applies m/v2-tq again; to stay: `spark-deploy use m/v2`"),
        ("m/v2", "applies the current settings"),
    ],
)
def test_a_rollback_says_where_the_next_up_goes_and_how_to_stay(chosen: str, then: str) -> None:
    release = {**RIGHT["releases"][0], "model": "m", "profile": "v2"}
    host = FakeHost(Status=told({**RIGHT, "releases": [release]}))
    assert outcome(host, releases.verify_rollback, "main", chosen) == []
    assert host.logs == [f"serves m/v2 ({RELEASE}), proven; the next `spark-deploy up` {then}"]


def plan() -> Any:
    return SimpleNamespace(service="main", name=RELEASE, cluster=None)


def status(**service: Any) -> FakeHost:
    of_main = {**RIGHT["services"]["main"], **service}
    return FakeHost(Status=told({**RIGHT, "services": {"main": of_main}}))


def test_a_deploy_reports_a_stop_and_does_not_undo_it() -> None:
    stopped = {
        "schema_version": 1,
        "at": "2026-11-21T10:00:00Z",
        "by": "ann@desk",
        "release": RELEASE,
    }
    host = status(stopped_by_hand=stopped, active=None)
    assert outcome(host, serve.roll_out, plan(), 60) == []
    assert "stopped on purpose by ann@desk and is down since 2026-11-21T10" in host.logs[0]
    assert "`spark-deploy start` starts it" in host.logs[0]
    assert outcome(host, serve.verify_service, plan(), SimpleNamespace()) == []


def test_a_deploy_after_a_rollback_says_that_it_goes_to_what_group_vars_say() -> None:
    gone_back = {
        "schema_version": 1, "state": "done", "from": RELEASE, "to": "main-aaaaaaaaaaaa",
        "at": "then",
    }  # fmt: skip
    host = status(active="main-aaaaaaaaaaaa", good="main-aaaaaaaaaaaa", rolled_back=gone_back)
    assert len(outcome(host, serve.roll_out, plan(), 60)) == 1
    assert f"was rolled back from {RELEASE}" in host.logs[0]
    assert f"group_vars say {RELEASE}" in host.logs[0]


def test_a_change_ended_by_force_after_its_proof_leaves_no_failed_unit() -> None:
    [release] = RIGHT["releases"]
    host = FakeHost(Status=told({**RIGHT, "releases": [{**release, "change_failed": True}]}))
    assert outcome(host, serve.roll_out, plan(), 60) == [
        f"systemctl reset-failed spark-switch@{RELEASE}.service"
    ]
    down = {**RIGHT["services"]["main"], "active": None}
    host = FakeHost(
        Status=told(
            {**RIGHT, "releases": [{**release, "change_failed": True}], "services": {"main": down}}
        )
    )
    assert outcome(host, serve.roll_out, plan(), 60) == [f"change_now({RELEASE}, 60)"]


OTHER = "main-aaaaaaaaaaaa"


class Failed:
    name, connector = "first", None


FAILED = Failed()


@pytest.mark.parametrize(
    ("service", "starts"),
    [
        ({"active": None, "good": None}, True),
        ({"active": None, "good": RELEASE}, True),
        ({"active": None, "good": OTHER}, False),
        ({"active": OTHER, "good": OTHER}, False),
        ({"active": OTHER, "good": None}, False),
        ({"active": RELEASE, "good": None}, False),
    ],
)
def test_only_a_host_with_nothing_to_lose_starts_beside_the_others(
    service: dict[str, Any], starts: bool
) -> None:
    assert len(outcome(status(**service), serve.start_service, plan(), 60)) == starts


def test_a_first_start_waits_for_no_other_host_and_a_replacement_does() -> None:
    for service, operation, refused in (
        ({"active": None, "good": None}, serve.start_service, False),
        ({"active": OTHER, "good": OTHER}, serve.roll_out, True),
    ):
        host = status(**service)
        host.state.inventory = [FAILED]
        host.state.results = {FAILED: SimpleNamespace(error_ops=1)}
        [command] = outcome(host, operation, plan(), 60)
        assert ("because first failed first" in command) == refused


def test_a_dry_run_foretells_the_first_start_of_a_host_once() -> None:
    host = status(active=None, good=None)
    with on(host, executing=False) as state:
        state.inventory.get_host = lambda name: host
        first = list(serve.start_service._inner(plan(), 60))
        second = list(serve.roll_out._inner(plan(), 60))
    assert (len(first), second, host.noops) == (1, [], ["is served by then"])


def test_a_way_back_is_asked_without_changing_anything() -> None:
    assert "--dry" in WayBack().command("main", None)
    assert "--to main-aaaaaaaaaaaa --dry" in WayBack().command("main", "main-aaaaaaaaaaaa")
    assert "prune --dry" in Prunable().command("{}")


class Polled:
    """A host that answers one command after the other."""

    def __init__(self, *answers: str):
        self.answers, self.asked, self.logs, self.connected = list(answers), [], [], True
        self.data = {"_sudo": True}

    def log(self, text: str, **_: Any) -> None:
        self.logs.append(text)

    log_styled = log

    def run_shell_command(self, command: Any, **_: Any) -> tuple[bool, Any]:
        self.asked.append(str(command))
        out = self.answers.pop(0)
        if out.startswith("error: "):
            return False, SimpleNamespace(stdout="", stderr=out, output=out)
        return True, SimpleNamespace(stdout=out, stderr="", output=out)


def poll(**known: Any) -> str:
    return text_of(Rollout("r", **known))


def watched(*answers: str) -> tuple[bool, Polled]:
    host = Polled(*answers)
    done = releases._begin_and_watch(None, host, "switch-begin r", 60)  # type: ignore[arg-type]
    return done, host


def test_a_change_is_followed_under_the_id_it_was_begun_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases, "POLL_EVERY_S", 0)
    done, host = watched(
        '{"release": "r", "request": "id1", "joined": false}',
        poll(),
        poll(state="running", phase="check"),
        poll(state="switched", phase="done", times_s={"start": 1.0}),
    )
    assert done
    assert all("switch-poll r id1" in asked for asked in host.asked[1:])


def test_a_host_that_cannot_say_how_a_change_goes_is_asked_on_and_quoted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases, "POLL_EVERY_S", 0)
    done, host = watched(
        '{"release": "r", "request": "id1", "joined": false}',
        "error: systemctl show: no answer within 60 s; fix: run again",
        poll(state="switched", phase="done", times_s={"start": 1.0}),
    )
    assert done
    assert any("systemctl show: no answer within 60 s" in line for line in host.logs)


def test_a_change_that_never_ran_fails_at_once() -> None:
    done, host = watched(
        '{"release": "r", "request": "id1", "joined": false}',
        poll(state="not-started", failed_phase="begin", reason="the unit did not run"),
    )
    assert not done
    assert "not-started in phase begin: the unit did not run" in host.logs[-1]
