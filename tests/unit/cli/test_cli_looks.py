"""What status, doctor and connect say, from documents of real lab hosts."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_deploy.cli import status
from spark_deploy.cli.connect import connection_lines as connect_lines
from spark_deploy.cli.connect import connection_of
from spark_deploy.cli.doctor import verdict_lines as doctor_lines
from spark_deploy.cli.hosts import Target
from spark_deploy.cli.options import Options
from spark_deploy.cli.query_hosts import Answer
from spark_deploy.cli.status import status_lines, summary_of
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.hosts.status import Count, HostStatus
from tests.unit.planning.plans import shipped_catalog
from tests.unit.statuses import told

RELEASE = "main-aaaaaaaaaaaa"
CATALOG = shipped_catalog()


def listed(tmp_path: Path, name="lab-1", data=None, **overrides) -> Target:
    overrides = {
        "model": "lab-stub",
        "ssh.hostname": "10.0.0.9",
        "serve.names": ["lab-model", "other"],
        **overrides,
    }
    found = load_hosts({"lab": [name]}, root=tmp_path, overrides=overrides)[name]
    usual = {"ssh_hostname": "10.0.0.9", "ssh_user": "spark", "_sudo": True}
    return Target(name, data or usual, found, CATALOG)


def document(**changes) -> dict:
    """Return `spark-host status` of a lab host, shortened."""
    return {
        "releases": [
            {
                "name": RELEASE,
                "model": "lab-stub",
                "profile": "v2",
                "names": ["lab-model"],
                "restarts": 2,
                "proof": {
                    "level": "full",
                    "checked_at": "2020-01-01T00:00:00Z",
                    "checks": [{"name": "ready", "ok": True}, {"name": "copy", "ok": True}],
                    "stubbed": ["driver"],
                },
                "speed": ["speed: one stream 31.0 tokens/s", "way back: turn round"],
            }
        ],
        "services": {
            "main": {
                "good": RELEASE,
                "enabled": [RELEASE],
                "active": RELEASE,
                "stopped_by_hand": None,
                "traffic_open": True,
                "gateway": {"active": "active"},
            }
        },
        "jobs": [
            {"title": "fetch a", "state": "done"},
            {"title": "build b", "state": "running", "progress": {"bytes": 1, "total": 4}},
        ],
        "reboot_pending": "/run/reboot-required is set (libc6)",
        "memory": {"total_bytes": 16 * 2**30, "available_bytes": 4 * 2**30},
        "live": {"ok": True, "release": RELEASE, "seconds": 0.16},
        "events": {"main": [{"at": "2026-11-21T10:00:00Z", "kind": "stall", "text": "restarted"}]},
        **changes,
    }


def shown(tmp_path, found: dict) -> str:
    return "\n".join(status_lines(summary_of(Answer(listed(tmp_path), told(found)))))


def test_status_says_what_is_served_how_well_proven_and_what_differs(tmp_path):
    text = shown(tmp_path, document())
    assert f"lab-1: lab-stub with v2 as lab-model ({RELEASE})" in text
    assert "the plan is not locked yet" in text
    assert "full check, 2 of 2 passed" in text
    assert "days ago" in text
    assert "stand-ins: driver" in text
    assert "speed    one stream 31.0 tokens/s" in text
    assert "speed    way back: turn round" in text
    assert "reboot   pending: /run/reboot-required is set (libc6)" in text
    assert "answered in 0.2 s" in text
    assert "4.0 GiB of 16.0 GiB available, 2 restarts" in text
    assert "build b: running 25 %" in text
    assert "fetch a" not in text
    assert "2026-11-21T10:00:00Z stall: restarted" in text


def test_status_says_how_soon_a_later_turn_began_where_the_proof_asked(tmp_path):
    said = "turn 2 began to answer after 0.31 s, turn 1 after 4.02 s"
    for ok in (True, False):
        check = {"name": "prefix reuse", "ok": ok, "detail": said}
        found = document()
        found["releases"][0]["proof"]["checks"].append(check)
        assert (f"\n  prefix   {said}\n" in shown(tmp_path, found)) is ok


def test_status_names_what_the_check_warned_of(tmp_path):
    found = document()
    warning = {"name": "repeat", "ok": False, "detail": "two texts", "weight": "warn"}
    found["releases"][0]["proof"]["checks"].append(warning)
    assert "\n  warned   repeat: two texts\n" in shown(tmp_path, found)


def test_status_says_how_little_memory_the_start_left(tmp_path):
    found = document()
    start = {"lowest_bytes": 9 * 2**30, "after_s": 312.0, "floor_bytes": 4 * 2**30}
    found["releases"][0]["proof"]["start_memory"] = start
    said = "16.0 GiB available (lowest during the start 9.0 GiB, floor 4.0 GiB), 2 restarts"
    assert said in shown(tmp_path, found)


def test_status_says_who_stopped_a_service_and_that_it_was_rolled_back(tmp_path):
    found = document()
    service = found["services"]["main"]
    service["stopped_by_hand"] = {
        "schema_version": 1, "release": RELEASE, "at": "2026-11-21T10:00:00Z", "by": "ann@desk",
    }  # fmt: skip
    service["rolled_back"] = {
        "schema_version": 1, "state": "done", "from": "main-b", "to": RELEASE,
        "at": "2026-11-21T09:00:00Z",
    }  # fmt: skip
    text = shown(tmp_path, found)
    assert "stopped on purpose by ann@desk and is down since 2026-11-21T10:00:00Z" in text
    assert "rolled back from main-b at 2026-11-21T09:00:00Z, by hand" in text
    found["releases"].append({**found["releases"][0], "name": "main-b", "profile": "v2-tq"})
    assert "rolled back from lab-stub with v2-tq, main-b at" in shown(tmp_path, found)


def test_status_says_that_a_rollout_is_under_way_where_nothing_is_served_yet(tmp_path):
    found = document()
    there = {"release": RELEASE, "since": "2026-11-21T10:00:00Z", "phase": "start"}
    found["services"]["main"].update(active=None, rollout=there)
    said = "of lab-stub with v2 is under way since 2026-11-21T10:00:00Z (engine loads)"
    assert f"\n  rollout  {said}\n" in shown(tmp_path, found)
    assert "under way" not in shown(tmp_path, document())
    found["services"]["small"] = found["services"]["main"] | {"enabled": ["small-1"]}
    assert f"  service  small: serves nothing\n           rollout {said}\n" in shown(
        tmp_path, found
    )


@pytest.mark.parametrize(("counted", "said"), [({"main": Count(2, 1)}, True), ({}, False)])
def test_status_says_how_many_requests_run_and_wait(tmp_path, monkeypatch, capsys, counted, said):
    host = SimpleNamespace(
        get_fact=lambda fact, services=None: counted if services else told(document())
    )
    one = listed(tmp_path)
    monkeypatch.setattr(status, "select_hosts", lambda options, judged: [one])
    monkeypatch.setattr(status, "query", lambda hosts, ask: [Answer(one, ask(host, one))])
    status.status.callback.__wrapped__(Options(), files=False, planned=False)
    assert ("  requests 2 running, 1 waiting" in capsys.readouterr().out) == said
    status.status.callback.__wrapped__(Options(json=True), files=False, planned=False)
    [found] = json.loads(capsys.readouterr().out)
    assert found["requests"] == ({"running": 2, "waiting": 1} if said else None)


def test_status_says_of_each_pair_to_have_ready_what_is_missing(tmp_path):
    ready = {"model": "lab-tiny", "profile": "base"}
    one = {**summary_of(Answer(listed(tmp_path), told(document()))), "ready": []}
    one["ready"] = [{**ready, "missing": []}, {**ready, "missing": ["fetch x", "build y"]}]
    text = "\n".join(status_lines(one))
    assert "lab-tiny with base: a rollout needs no download and no build" in text
    assert "lab-tiny with base: not ready: fetch x, build y" in text


def test_status_of_a_proof_that_is_no_longer_current_says_why(tmp_path):
    found = document()
    found["releases"][0] |= {"unproven": "the driver changed"}
    assert "no longer current: the driver changed" in shown(tmp_path, found)


def test_status_of_an_untouched_host_is_one_line(tmp_path):
    assert shown(tmp_path, {}) == "lab-1: not set up yet"


def test_status_claims_nothing_of_a_host_whose_tools_it_cannot_read(tmp_path):
    strange = HostStatus(None, "its host tools are of another version (x: unknown)")
    said = "\n".join(status_lines(summary_of(Answer(listed(tmp_path), strange))))
    assert "serves nothing" not in said
    assert "lab-1: release unknown: its host tools are of another version" in said


@pytest.mark.parametrize("lines", [status_lines, doctor_lines])
def test_a_host_that_cannot_be_reached_is_one_line(lines):
    one = {"host": "lab-1", "reachable": False, "problem": "cannot be reached: refused"}
    assert list(lines(one)) == ["lab-1: cannot be reached: refused"]


def test_doctor_counts_reasons_and_names_each_with_its_fix():
    one = {
        "host": "lab-1",
        "reachable": True,
        "problems": [{"where": "disk /", "what": "1 GiB free", "fix": "free 9 GiB"}],
        "warnings": [{"where": "kernel", "what": "a reboot is pending", "fix": "reboot"}],
        "stubbed": ["driver 580+labstub"],
        "looks": {"system": "debian 12 on x86_64"},
        "stopped": {},
        "move": [],
    }
    text = "\n".join(doctor_lines(one))
    assert "would refuse it for 1 reason\n" in text
    assert "REFUSED   disk /: 1 GiB free" in text
    assert "fix: free 9 GiB" in text
    assert "warning   kernel" in text
    assert "stand-ins driver 580+labstub" in text


def test_connect_gives_a_tunnel_for_a_loopback_gateway(tmp_path):
    one = connection_of(listed(tmp_path))
    assert one.base_url == "http://127.0.0.1:8000/v1"
    assert (one.model, one.names) == ("lab-model", ("lab-model", "other"))
    assert one.tunnel == (
        "ssh -N -o ExitOnForwardFailure=yes -L 127.0.0.1:8000:127.0.0.1:8000 spark@10.0.0.9"
    )
    assert one.read_key == "ssh spark@10.0.0.9 sudo cat /etc/spark/api-key"
    assert "from here  ssh -N" in "\n".join(connect_lines(one))


def test_connect_to_a_gateway_on_the_network_needs_no_tunnel(tmp_path):
    one = connection_of(listed(tmp_path, **{"serve.expose": "lan", "serve.port": 9000}))
    assert (one.base_url, one.tunnel, one.ca) == ("http://10.0.0.9:9000/v1", None, None)
    assert "http://10.0.0.9:9000/v1/chat/completions" in one.example
    # What the shell puts into curl's argv is for every user of the machine to read.
    assert "$(" not in one.example


def test_connect_to_a_gateway_for_containers_names_their_url_and_what_it_takes(tmp_path):
    one = connection_of(listed(tmp_path, **{"serve.expose": "docker"}))
    text = "\n".join(connect_lines(one))
    assert one.base_url == "http://127.0.0.1:8000/v1"
    assert one.tunnel == (
        "ssh -N -o ExitOnForwardFailure=yes -L 127.0.0.1:8000:127.0.0.1:8000 spark@10.0.0.9"
    )
    assert "containers http://host.docker.internal:8000/v1" in text
    assert "--add-host host.docker.internal:host-gateway" in text


def test_connect_to_a_private_ca_says_where_the_ca_is_and_uses_it(tmp_path):
    private = {"serve.expose": "lan", "serve.tls": "private-ca", "serve.ca_dir": "/keys/ca"}
    one = connection_of(listed(tmp_path, **private, **{"serve.address": "spark.example.org"}))
    text = "\n".join(connect_lines(one))
    assert one.base_url == "https://spark.example.org:8000/v1"
    assert "CA         /keys/ca/ca.pem" in text
    assert "curl -s --cacert /keys/ca/ca.pem https://spark.example.org:8000/v1/chat" in text


def test_connect_to_a_certificate_of_ones_own_needs_no_ca(tmp_path):
    own = {"serve.tls_certificate": "/c.pem", "serve.tls_key": "/k.pem", "serve.tls": "own-cert"}
    one = connection_of(listed(tmp_path, **own, **{"serve.expose": "lan"}))
    assert (one.base_url, one.ca) == ("https://10.0.0.9:8000/v1", None)
    assert "--cacert" not in one.example


def test_connect_to_a_tailnet_uses_the_address_of_the_settings_or_of_the_host(tmp_path):
    tailnet = {"serve.expose": "tailscale"}
    named = connection_of(listed(tmp_path, **tailnet, **{"serve.address": "spark.tail.example"}))
    asked = connection_of(listed(tmp_path, **tailnet), tailnet_address="100.101.102.103")
    unknown = connection_of(listed(tmp_path, **tailnet))
    assert named.base_url == "http://spark.tail.example:8000/v1"
    assert (asked.base_url, asked.tunnel) == ("http://100.101.102.103:8000/v1", None)
    assert (unknown.base_url, bool(unknown.tunnel)) == ("http://127.0.0.1:8000/v1", True)


def test_connect_to_this_machine_needs_no_ssh(tmp_path):
    one = connection_of(listed(tmp_path, "@local", {"_sudo": True}))
    assert (one.tunnel, one.read_key) == (None, "sudo cat /etc/spark/api-key")
    root = connection_of(listed(tmp_path, "@local", {"_sudo": False}))
    assert root.read_key == "cat /etc/spark/api-key"


def test_connect_gives_each_host_of_an_inventory_a_port_of_its_own_here(tmp_path):
    one = connection_of(listed(tmp_path), place=2)
    assert one.base_url == "http://127.0.0.1:8002/v1"
    assert "-L 127.0.0.1:8002:127.0.0.1:8000 " in one.tunnel
    assert "http://127.0.0.1:8002/v1/chat/completions" in one.example
    network = connection_of(listed(tmp_path, **{"serve.expose": "lan"}), place=2)
    assert network.base_url == "http://10.0.0.9:8000/v1"


def test_what_a_host_serves_is_shown_when_what_it_is_to_serve_is_impossible(tmp_path):
    """Nobody has to mend a choice before looking."""
    host = listed(tmp_path).serving("nobody-has-this", "v2")
    text = "\n".join(status_lines(summary_of(Answer(host, told(document())))))
    assert f"lab-stub with v2 as lab-model ({RELEASE})" in text
    assert "the settings cannot be served: " in text
    assert "nobody-has-this" in text
