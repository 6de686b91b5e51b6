"""Hosts that lend each other what they have: opened where it helps, closed at the end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from spark_contract.fetching import SHARE_KEY
from spark_contract.job import JobState, ReceiptProof

from spark_deploy.config.settings.sources import FleetSettings
from spark_deploy.hosts import downloads as peer_download
from spark_deploy.hosts.downloads import LoginAddress
from spark_deploy.hosts.status import Jobs
from spark_deploy.plan.jobs import Work, jobs_of
from spark_deploy.plan.types import FileState, ManagedFile
from tests.unit.operations.test_operations import FakeHost, on, shown
from tests.unit.planning.plans import plan_of

WORKS = jobs_of(plan_of("large", "v2"), ())
NAME = "main-aaaaaaaaaaaa"
RECEIPTS = {
    work.job.proof.receipt: FileState(0o644, "root:root", "a" * 64)
    for work in WORKS
    if isinstance(work.job.proof, ReceiptProof)
}


class Lab:
    """Hosts of one run, asked one after the other as pyinfra does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **states: str):
        self.hosts = {name: self._host(name, state) for name, state in states.items()}
        self.placed: dict[str, list[ManagedFile]] = {}
        monkeypatch.setattr(peer_download, "current_host", lambda: self.current)
        monkeypatch.setattr(peer_download, "place_files", self._place)
        monkeypatch.setattr(
            peer_download, "read_fact", lambda fact, **words: self._read(fact, words)
        )
        self.current: Any = None

    def _host(self, name: str, state: str) -> FakeHost:
        host = FakeHost()
        host.name = name
        told = {
            work.job.digest12: JobState(
                work.job.digest, "t", work.job.kind, state, "", None, None, None, None, ()  # type: ignore[arg-type]
            )
            for work in WORKS
        }  # fmt: skip
        host.facts = {
            "JobStates": Jobs(told if state else {}),
            "LoginAddress": f"10.0.0.{name}",
            "FileStates": RECEIPTS,
        }
        return host

    def _read(self, fact: Any, words: dict[str, Any]) -> Any:
        if fact is LoginAddress:
            assert words == {"_sudo": False}
        return self.current.facts[fact.__name__]

    def _place(self, files: Any) -> Iterator[str]:
        self.placed[self.current.name] = list(files)
        yield "put " + " ".join(file.path for file in files)

    def each(self, operation: Any, *arguments: Any) -> dict[str, list[str]]:
        return {name: self.one(name, operation, *arguments) for name in self.hosts}

    def one(self, name: str, operation: Any, *arguments: Any) -> list[str]:
        self.current = self.hosts[name]
        state = self.current.state
        state.inventory, state.failed_hosts = list(self.hosts.values()), set()
        with on(self.current):
            return [shown(command) for command in operation._inner(*arguments)]

    def lend(self, **settings: Any) -> dict[str, list[str]]:
        fleet = FleetSettings(**settings)
        assert not any(self.each(peer_download.note_files, WORKS, NAME, fleet).values())
        return self.each(peer_download.start_sharing, WORKS, fleet)

    def asked(self, name: str) -> list[str]:
        """Return whom the fetch of a host asks before the hub."""
        self.current = self.hosts[name]
        with on(self.current):
            work: Work = peer_download.with_known_peers(WORKS[0])
        order = json.loads(work.inputs[0].content)
        urls: list[str] = order.get("peers", {"urls": []})["urls"]
        return urls


def test_a_run_in_which_no_host_lacks_anything_opens_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(monkeypatch, a="done", b="done")
    assert lab.lend() == {"a": [], "b": []}
    assert lab.each(peer_download.stop_sharing) == {"a": [], "b": []}


def test_of_hosts_that_have_nothing_the_first_fetches_and_the_others_take_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(monkeypatch, a="", b="", c="")
    opened = lab.lend()
    assert all("systemctl restart spark-share@trees.service" in one[1] for one in opened.values())
    assert lab.asked("a") == []
    assert lab.asked("b") == ["http://10.0.0.a:8010"]
    assert lab.asked("c") == ["http://10.0.0.b:8010", "http://10.0.0.a:8010"]


def test_a_host_that_is_added_takes_all_from_those_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(monkeypatch, a="done", b="done", c="")
    opened = lab.lend()
    assert [len(opened[name]) for name in "abc"] == [2, 2, 1]  # c has only the key
    assert sorted(lab.asked("c")) == ["http://10.0.0.a:8010", "http://10.0.0.b:8010"]


def test_a_finished_tree_is_copied_by_the_hash_of_its_receipt_that_the_login_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(monkeypatch, a="done", b="")
    lab.lend()
    lab.current = lab.hosts["b"]
    with on(lab.current):
        _, build, _ = map(peer_download.with_known_peers, WORKS)
    copy = json.loads(build.inputs[1].content)
    assert copy["trees"] == [{"url": "http://10.0.0.a:8010", "receipt_sha256": "a" * 64}]


def test_the_key_is_one_for_all_and_nobody_else_s_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, a="done", b="")
    commands = lab.lend()
    keys = {file.content: file for files in lab.placed.values() for file in files
            if file.path == SHARE_KEY}  # fmt: skip
    [(content, file)] = keys.items()
    assert file.mode == 0o600
    assert len(content) > 32
    assert content.decode().strip() not in str(commands)


def test_at_the_end_what_was_opened_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, a="done", b="")
    lab.lend()
    closing = lab.each(peer_download.stop_sharing)
    for [command] in closing.values():
        assert "systemctl stop spark-share@trees.service" in command
        assert f"rm -f {SHARE_KEY}" in command
    assert lab.each(peer_download.stop_sharing) == {"a": [], "b": []}


def test_what_an_earlier_run_left_open_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, a="done", b="done")
    found = lab.hosts["a"].facts["JobStates"]
    lab.hosts["a"].facts["JobStates"] = dataclasses.replace(found, lends=True)
    assert lab.lend(share=False) == {"a": [], "b": []}
    closing = lab.each(peer_download.stop_sharing)
    assert ["systemctl stop" in str(closing[name]) for name in "ab"] == [True, False]


def test_a_host_alone_or_one_that_shall_not_share_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Lab(monkeypatch, a="").lend() == {"a": []}
    lab = Lab(monkeypatch, a="done", b="")
    assert lab.lend(share=False) == {"a": [], "b": []}
    assert lab.asked("b") == []


def test_a_host_whose_address_is_not_known_takes_but_does_not_lend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(monkeypatch, a="", b="", c="")
    lab.hosts["b"].facts["LoginAddress"] = ""
    assert [len(one) for one in lab.lend().values()] == [2, 1, 2]
    assert lab.asked("b") == ["http://10.0.0.a:8010"]
    assert lab.asked("c") == ["http://10.0.0.a:8010"]
    assert "set fleet.address" in lab.hosts["b"].logs[-1]


def test_a_host_that_has_failed_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, a="", b="", c="")
    lab.lend()
    lab.hosts["c"].state.failed_hosts = {lab.hosts["b"]}
    assert lab.asked("c") == ["http://10.0.0.a:8010"]


def test_an_image_that_is_there_is_lent_only_with_its_blobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = WORKS[-1].layers
    assert layers is not None
    kept = {f"{layers.out}/receipt.json": FileState(0o644, "root:root", "b" * 64)}

    def asked_of(facts: dict[str, FileState]) -> list[str]:
        lab = Lab(monkeypatch, a="done", b="")
        lab.hosts["a"].facts["FileStates"] = facts
        lab.lend()
        lab.current = lab.hosts["b"]
        with on(lab.current):
            image = peer_download.with_known_peers(WORKS[-1])
        return [str(file.content) for file in image.inputs if file.path.endswith("layers.json")]

    assert asked_of(RECEIPTS) == []
    [order] = asked_of({**RECEIPTS, **kept})
    assert "http://10.0.0.a:8010" in order
