import json
from types import SimpleNamespace

import pytest

from spark_deploy.cli import status
from spark_deploy.cli.console import Options
from spark_deploy.cli.doctor import verdict_lines
from spark_deploy.cli.hosts import Answer
from spark_deploy.cli.status import status_lines, summarize
from spark_deploy.cli.status_rows import short_lines
from spark_deploy.hosts.status import HostStatus, RequestCounts
from tests.unit.cli.targets import target_of
from tests.unit.statuses import host_status

RELEASE = "main-aaaaaaaaaaaa"
PROOF = {
    "level": "full",
    "checked_at": "2020-01-01T00:00:00Z",
    "checks": [{"name": "ready"}, {"name": "copy"}],
    "stubbed": ["driver"],
}


def document(checks=None, **proof):
    return {
        "releases": [{
            "name": RELEASE, "model": "lab-stub", "profile": "v2", "names": ["lab-model"],
            "restarts": 2, "speed": ["speed: one stream 31.0 tokens/s", "way back: turn round"],
            "proof": {**PROOF, "checks": [*PROOF["checks"], *(checks or [])], **proof},
        }],
        "services": {"main": {
            "known_good": RELEASE, "enabled": [RELEASE], "active": RELEASE, "traffic_open": True,
            "gateway": {"active": "active"},
        }},
        "jobs": [
            {"title": "fetch a", "state": "done"},
            {"title": "build b", "state": "running", "progress": {"bytes": 1, "total": 4}},
        ],
        "reboot_pending": "/run/reboot-required exists (libc6)",
        "memory": {"total_bytes": 16 * 2**30, "available_bytes": 4 * 2**30},
        "live": {"ok": True, "release": RELEASE, "seconds": 0.16},
        "events": {"main": [{"at": "2026-11-21T10:00:00Z", "kind": "stall", "text": "restarted"}]},
    }  # fmt: skip


def text_of(tmp_path, data, target=None):
    status = data if isinstance(data, HostStatus) else host_status(data)
    return "\n".join(status_lines(summarize(Answer(target or target_of(tmp_path), status))))


def test_status_shows_each_service_on_one_line_with_a_state_symbol(tmp_path):
    serving = document(bench={"one_stream_tokens_per_s": {"median": 31.04}})
    serving["services"]["embed"] = {**serving["services"]["main"], "active": None}
    stopped, target = document(), target_of(tmp_path)
    stopped["services"]["main"]["active"] = None
    as_planned = {**summarize(Answer(target, host_status(serving))), "drift": ""}
    unplanned = summarize(Answer(target, host_status(serving)))
    off = {"host": "lab-2", "reachable": False, "problem": "unreachable: no"}
    stops = {**summarize(Answer(target, host_status(stopped))), "drift": ""}
    lines = [line.split(maxsplit=2) for line in short_lines([as_planned, unplanned, off, stops])]
    assert [line[:2] for line in lines] == [
        ["●", "lab-1"], ["○", "lab-1/embed"], ["◐", "lab-1"], ["the", "plan"],
        ["○", "lab-1/embed"], ["○", "lab-2"], ["○", "lab-1"],
    ]  # fmt: skip
    for part in ("lab-stub  v2  31.0 tok/s  4.0 GiB free  checked ", "days ago"):
        assert part in lines[0][2]


def test_status_of_serving_host_shows_release_last_check_and_differences(tmp_path):
    text = text_of(tmp_path, document())
    for part in (
        f"lab-1: lab-stub with v2 as lab-model ({RELEASE})", "the plan is not locked yet",
        "full check, 2 of 2 passed", "days ago", "stand-ins: driver",
        "speed    one stream 31.0 tokens/s", "speed    way back: turn round",
        "reboot   pending: /run/reboot-required exists (libc6)", "answered in 0.2 s",
        "4.0 GiB of 16.0 GiB available, 2 restarts", "build b: running 25 %",
        "2026-11-21T10:00:00Z stall: restarted",
    ):  # fmt: skip
        assert part in text
    assert "fetch a" not in text


REUSE = "the first token came after 4.02 s in turn 1 and 0.31 s in turn 2"
WARNING = {"name": "repeat", "ok": False, "detail": "two texts", "severity": "warn"}
START = {"lowest_bytes": 9 * 2**30, "after_s": 312.0, "floor_bytes": 4 * 2**30}


@pytest.mark.parametrize(
    ("data", "line", "is_shown"),
    [
        (document([{"name": "prefix reuse", "ok": True, "detail": REUSE}]), REUSE, True),
        (document([{"name": "prefix reuse", "ok": False, "detail": REUSE}]), REUSE, False),
        (
            {**document(), "unit_overrides": ["/etc/a.conf"]},
            "list it in expect.unit_overrides",
            True,
        ),
        (document([WARNING]), "  warned   repeat: two texts", True),
        (document(start_memory=START), "startup 9.0 GiB, floor 4.0 GiB), 2 restarts", True),
    ],
)
def test_status_shows_details_of_checks(tmp_path, data, line, is_shown):
    assert (f"{line}\n" in text_of(tmp_path, data)) is is_shown


def test_status_shows_why_a_check_is_outdated(tmp_path):
    data = document()
    data["releases"][0]["unproven"] = "the driver changed"
    assert "no longer current: the driver changed" in text_of(tmp_path, data)


def test_status_shows_who_stopped_or_rolled_back_a_service_and_when(tmp_path):
    data = document()
    data["services"]["main"]["stopped_by_hand"] = {
        "schema_version": 1, "release": RELEASE, "at": "2026-11-21T10:00:00Z", "by": "ann@desk",
    }  # fmt: skip
    data["services"]["main"]["rolled_back"] = {
        "schema_version": 1, "state": "done", "from": "main-b", "to": RELEASE,
        "at": "2026-11-21T09:00:00Z",
    }  # fmt: skip
    text = text_of(tmp_path, data)
    assert "stopped on purpose by ann@desk at 2026-11-21T10:00:00Z" in text
    assert "rolled back manually from main-b at 2026-11-21T09:00:00Z" in text
    data["releases"].append({**data["releases"][0], "name": "main-b", "profile": "v2-tq"})
    assert "rolled back manually from lab-stub with v2-tq, main-b at" in text_of(tmp_path, data)


def test_on_request_service_that_is_idle_is_not_a_difference_from_the_plan():
    data = document()
    marker = {"schema_version": 1, "release": "small-1", "at": "then", "on_request": True}
    data["services"]["small"] = {
        "known_good": "small-1",
        "enabled": ["small-1"],
        "stopped_by_hand": marker,
    }
    plan = SimpleNamespace(services=[SimpleNamespace(release=SimpleNamespace(
        service="small", name="small-1"))])  # fmt: skip
    [service] = status._services(plan, host_status(data))
    assert (service["stopped"], service["drift"]) == ("stopped (on request)", "")
    data["services"]["small"]["known_good"] = "small-0"
    [service] = status._services(plan, host_status(data))
    assert service["drift"]


def test_status_shows_the_running_rollout_of_each_service(tmp_path):
    data = document()
    rollout = {"release": RELEASE, "since": "2026-11-21T10:00:00Z", "phase": "start"}
    data["services"]["main"].update(active=None, rollout=rollout)
    data["services"]["small"] = data["services"]["main"] | {"enabled": ["small-1"]}
    text, line = (
        text_of(tmp_path, data),
        "of lab-stub with v2 in progress since 2026-11-21T10:00:00Z",
    )
    assert f"\n  rollout  {line} (" in text
    assert f"  service  small: serves nothing\n           rollout {line} (" in text
    assert "in progress" not in text_of(tmp_path, document())


@pytest.mark.parametrize(
    ("counts", "expected"),
    [({"main": RequestCounts(2, 1)}, {"running": 2, "waiting": 1}), ({}, None)],
)
def test_requests_in_running_engines_are_counted(tmp_path, monkeypatch, capsys, counts, expected):
    host = SimpleNamespace(
        get_fact=lambda fact, services=None: counts if services else host_status(document())
    )
    target, run = target_of(tmp_path), status.status.callback.__wrapped__
    monkeypatch.setattr(status, "select_hosts", lambda options, must_serve: [target])
    monkeypatch.setattr(status, "query", lambda hosts, read: [Answer(target, read(host, target))])
    run(Options(verbose=True), files=False, planned=False)
    assert ("2 running, 1 waiting" in capsys.readouterr().out) == bool(expected)
    run(Options(json=True), files=False, planned=False)
    assert json.loads(capsys.readouterr().out)[0]["requests"] == expected


def test_status_lists_missing_jobs_for_each_keep_ready_entry(tmp_path):
    summary = summarize(Answer(target_of(tmp_path), host_status(document())))
    pair = {"model": "lab-tiny", "profile": "base"}
    summary["ready"] = [{**pair, "missing": []}, {**pair, "missing": ["fetch x", "build y"]}]
    text = "\n".join(status_lines(summary))
    assert "lab-tiny with base: ready; a rollout needs no download or build" in text
    assert "lab-tiny with base: not ready: fetch x, build y" in text


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({}, "lab-1: not set up yet"),
        (HostStatus(None, "its host tools are of another version"), "lab-1: release unknown: its"),
    ],
)
def test_status_shows_no_release_if_host_tools_are_unreadable(tmp_path, data, line):
    text = text_of(tmp_path, data)
    assert text.startswith(line)
    assert "serves nothing" not in text


@pytest.mark.parametrize("lines", [status_lines, verdict_lines])
def test_status_shows_an_unreachable_host_on_one_line(lines):
    host = {"host": "lab-1", "reachable": False, "problem": "unreachable: refused"}
    assert list(lines(host)) == ["lab-1: unreachable: refused"]


def test_status_shows_the_running_release_despite_invalid_settings(tmp_path):
    text = text_of(tmp_path, document(), target_of(tmp_path).with_model("no-such-model", "v2"))
    assert f"lab-stub with v2 as lab-model ({RELEASE})" in text
    assert "these settings cannot be deployed: " in text
    assert "no-such-model" in text
