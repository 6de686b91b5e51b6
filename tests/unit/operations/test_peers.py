import dataclasses
import json
from typing import Any

import pytest
from spark_contract.fetching import SHARE_KEY, SHARE_SETTINGS
from spark_contract.job import JobState, ReceiptProof

from spark_deploy.config.settings.sources import FleetSettings
from spark_deploy.hosts import downloads
from spark_deploy.hosts.downloads import LoginAddress
from spark_deploy.hosts.status import Jobs
from spark_deploy.plan.jobs import plan_jobs
from spark_deploy.plan.types import FileState, ManagedFile
from tests.unit.operations.fake_host import FakeHost, describe, on
from tests.unit.planning.plans import plan_of

WORKS = plan_jobs(plan_of("large", "v2"), ())
RECEIPTS = {
    work.job.proof.receipt: FileState(0o644, "root:root", "a" * 64)
    for work in WORKS
    if isinstance(work.job.proof, ReceiptProof)
}


class Fleet:
    def __init__(self, monkeypatch, **states):
        self.hosts = {name: self._host(name, state) for name, state in states.items()}
        self.placed: dict[str, list[ManagedFile]] = {}
        self.current: Any = None
        monkeypatch.setattr(downloads, "current_host", lambda: self.current)
        monkeypatch.setattr(downloads, "place_files", self._place)
        monkeypatch.setattr(downloads, "read_fact", self._read)

    def _host(self, name, state):
        jobs = {
            work.job.digest12: JobState(
                work.job.digest, "t", work.job.kind, state, "", None, None, None, None, ()
            )
            for work in WORKS
        }
        facts = {"JobStates": Jobs(jobs if state else {}), "LoginAddress": f"10.0.0.{name}"}
        return FakeHost(name=name, FileStates=RECEIPTS, **facts)

    def _read(self, fact, **arguments):
        assert fact is not LoginAddress or arguments == {"_sudo": False}
        return self.current.facts[fact.__name__]

    def _place(self, files):
        self.placed[self.current.name] = list(files)
        yield "put " + " ".join(file.path for file in files)

    def run(self, operation, *arguments):
        commands = {}
        for name, host in self.hosts.items():
            self.current, state = host, host.state
            state.inventory, state.failed_hosts = list(self.hosts.values()), set()
            with on(host):
                commands[name] = [describe(command) for command in operation._inner(*arguments)]
        return commands

    def share(self, ports=(8000,), **settings):
        fleet = FleetSettings(**settings)
        assert not any(self.run(downloads.record_files, WORKS, "main-a", fleet).values())
        return self.run(downloads.start_sharing, WORKS, fleet, ports)

    def stop(self):
        return self.run(downloads.stop_sharing)

    def work(self, name, number=0):
        self.current = self.hosts[name]
        with on(self.current):
            return downloads.with_known_peers(WORKS[number])

    def peers(self, name):
        plan = json.loads(self.work(name).inputs[0].content)
        urls: list[str] = plan.get("peers", {"urls": []})["urls"]
        return urls


@pytest.mark.parametrize(
    ("states", "share"),
    [({"a": "done", "b": "done"}, True), ({"a": ""}, True), ({"a": "done", "b": ""}, False)],
    ids=["nothing missing", "single host", "disabled"],
)
def test_peer_port_is_opened_only_if_another_host_lacks_files(monkeypatch, states, share):
    fleet = Fleet(monkeypatch, **states)
    assert fleet.share(share=share) == fleet.stop() == {name: [] for name in states}
    assert fleet.peers(next(reversed(states))) == []


def test_first_host_downloads_and_other_hosts_copy_from_it(monkeypatch):
    fleet = Fleet(monkeypatch, a="", b="", c="")
    for commands in fleet.share().values():
        assert "systemctl restart spark-share@trees.service" in commands[1]
    assert fleet.peers("a") == []
    assert fleet.peers("b") == ["http://10.0.0.a:8010"]
    assert fleet.peers("c") == ["http://10.0.0.b:8010", "http://10.0.0.a:8010"]
    fleet.hosts["c"].state.failed_hosts = {fleet.hosts["b"]}
    assert fleet.peers("c") == ["http://10.0.0.a:8010"]


def test_peer_downloads_leave_the_ports_of_services_free(monkeypatch):
    fleet = Fleet(monkeypatch, a="done", b="")
    fleet.share(ports=(8000, 8010, 8011))
    [settings] = (file for file in fleet.placed["a"] if file.path == SHARE_SETTINGS)
    assert json.loads(settings.content)["port"] == 8012
    assert fleet.peers("b") == ["http://10.0.0.a:8012"]


def test_new_host_copies_files_from_complete_hosts(monkeypatch):
    fleet = Fleet(monkeypatch, a="done", b="done", c="")
    commands = fleet.share()
    assert [len(commands[name]) for name in "abc"] == [2, 2, 1]
    urls = ["http://10.0.0.a:8010", "http://10.0.0.b:8010"]
    assert sorted(fleet.peers("c")) == urls
    copy = json.loads(fleet.work("c", 1).inputs[1].content)
    trees = sorted(copy["trees"], key=lambda tree: tree["url"])
    assert trees == [{"url": url, "receipt_sha256": "a" * 64} for url in urls]
    files = [file for files in fleet.placed.values() for file in files if file.path == SHARE_KEY]
    assert {file.mode for file in files} == {0o600}
    [key] = {file.content.decode().strip() for file in files}
    assert len(key) > 31
    assert key not in str(commands)
    for [command] in fleet.stop().values():
        assert "systemctl stop spark-share@trees.service" in command
        assert f"rm -f {SHARE_KEY}" in command
    assert fleet.stop() == {"a": [], "b": [], "c": []}


def test_next_run_stops_peer_sharing_left_by_an_interrupted_run(monkeypatch):
    fleet = Fleet(monkeypatch, a="done", b="done")
    facts = fleet.hosts["a"].facts
    facts["JobStates"] = dataclasses.replace(facts["JobStates"], shares_files=True)
    assert fleet.share(share=False) == {"a": [], "b": []}
    assert {name: len(commands) for name, commands in fleet.stop().items()} == {"a": 1, "b": 0}


def test_host_with_an_unknown_address_does_not_share_files(monkeypatch):
    fleet = Fleet(monkeypatch, a="", b="", c="")
    fleet.hosts["b"].facts["LoginAddress"] = ""
    assert [len(commands) for commands in fleet.share().values()] == [2, 1, 2]
    assert fleet.peers("b") == fleet.peers("c") == ["http://10.0.0.a:8010"]
    assert "set fleet.address" in fleet.hosts["b"].logs[-1]


@pytest.mark.parametrize("kept", [False, True])
def test_image_is_shared_only_if_its_blobs_are_stored(monkeypatch, kept):
    layers = WORKS[-1].layers
    assert layers is not None
    fleet = Fleet(monkeypatch, a="done", b="")
    receipt = {f"{layers.out}/receipt.json": FileState(0o644, "root:root", "b" * 64)}
    fleet.hosts["a"].facts["FileStates"] = {**RECEIPTS, **(receipt if kept else {})}
    fleet.share()
    inputs = fleet.work("b", -1).inputs
    plans = [str(file.content) for file in inputs if file.path.endswith("layers.json")]
    assert ["http://10.0.0.a:8010" in plan for plan in plans] == [True] * kept
