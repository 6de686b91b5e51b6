import json

import pytest
from spark_contract import documents
from spark_contract.records import KnownGoodReleases, RollbackRecord, Rollout
from spark_contract.status import RunningRollout
from spark_contract.units import GATEWAY, SERVE, SWITCH
from spark_host import status
from spark_host.check import runner
from spark_host.system import host as system
from spark_host.system import systemd
from spark_host.system.host import record_event
from stub_host import RELEASE

from spark_deploy.hosts.status import Status

OTHER = "main-ffffffffffff"


@pytest.fixture
def read_status(host, monkeypatch):
    def read(**unit):
        states = {"ActiveState": "active", "InvocationID": "run-1", "NRestarts": "2", **unit}
        known = system.release_names(host.paths)
        units = [template.unit(name) for template in (SERVE, SWITCH) for name in known]

        def loaded(_, properties):
            unit = {name: states[name] for name in properties if name in states}
            return dict.fromkeys([*units, GATEWAY.unit("main")], unit)

        monkeypatch.setattr(systemd, "show_loaded", loaded)
        document = documents.to_plain(status.main([], host.paths))
        return Status().process([json.dumps(document)])

    return read


def test_status_of_an_empty_host(read_status):
    host_status = read_status()
    assert host_status.report.releases == ()
    assert (host_status.report.services, host_status.report.live) == ({}, None)
    assert host_status.report.memory.total_bytes > host_status.report.memory.available_bytes > 0


def test_status_of_a_release_and_its_proof(host, read_status):
    release = host.release()
    never = read_status().release(RELEASE)
    assert (never.active, never.restarts, never.proof) == ("active", 2, None)
    assert never.unproven == "never checked"

    host.started(release)
    runner.check(release, host.here, "full", print, invocation_id="run-1")
    proven = read_status().release(RELEASE)
    assert (proven.proof.release, proven.proof.level, proven.unproven) == (RELEASE, "full", None)
    assert read_status(InvocationID="run-2").release(RELEASE).unproven == (
        "the engine was started after the last check"
    )
    assert read_status(ActiveState="failed").release(RELEASE).unproven == "not running"


def test_status_reports_an_interrupted_rollout_of_its_release(host, read_status):
    host.release()
    assert not read_status().has_failed_change(RELEASE)
    assert read_status(ActiveState="failed").has_failed_change(RELEASE)
    assert not read_status(ActiveState="failed").has_failed_change(OTHER)


def test_status_reports_a_running_rollout(host, read_status):
    host.release()
    here = host.here
    record = Rollout(RELEASE, "then", invocation_id="run-1", state="running", phase="start")
    here.disk.write(here.paths.rollout(RELEASE), record)
    assert read_status(ActiveState="activating").rollout("main") == RunningRollout(
        RELEASE, "then", "start"
    )
    assert read_status(ActiveState="inactive", Job="7").rollout("main").phase == "start"
    assert read_status(ActiveState="inactive", Job="0").rollout("main") is None


def test_status_of_a_service_with_rollback_and_events(host, read_status):
    release, here = host.release(), host.here
    here.disk.write(here.paths.known_good("main"), KnownGoodReleases(RELEASE, (OTHER,), "then"))
    here.disk.write(here.paths.rollback("main"), RollbackRecord("done", OTHER, RELEASE, "then"))
    record_event(release, "hot", "the GPU is at 91 °C", host.paths)
    host_status = read_status()
    main = host_status.service("main")
    assert (main.known_good, main.active, main.traffic_open) == (RELEASE, RELEASE, False)
    assert (main.rolled_back.from_release, main.rolled_back.to) == (OTHER, RELEASE)
    [event] = host_status.report.events["main"]
    assert (event.release, event.kind, event.text) == (RELEASE, "hot", "the GPU is at 91 °C")
    assert json.loads(host.paths.events("main").read_text()) == {
        "at": event.at, "release": RELEASE, "kind": "hot", "text": "the GPU is at 91 °C",
    }  # fmt: skip
