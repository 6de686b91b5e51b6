"""Members of a cluster notice joins, losses and silence."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from spark_contract.paths import Paths
from spark_contract.release import Release
from spark_host.check import runner
from spark_host.check import runner as cluster
from spark_host.system import systemd
from spark_host.system.host import Host
from spark_host.watch import watchdog as watching
from test_members import clustered, with_tables

HEAD, WORKER = "127.0.0.2", "127.0.0.3"


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HEAD, 0))
        return int(free.getsockname()[1]) - 1


def pair(**changes: float) -> Release:
    """Return a release of two members that are two addresses of this machine."""
    release = clustered()
    assert release.cluster is not None
    head, worker = (
        dataclasses.replace(member, address=address)
        for member, address in zip(release.cluster.members, (HEAD, WORKER), strict=True)
    )
    cluster = dataclasses.replace(
        release.cluster, members=(head, worker), port=free_port(), **changes
    )
    watch = dataclasses.replace(release.watch, interval_s=0.05)
    return dataclasses.replace(release, cluster=cluster, watch=watch)


def tables(root: Path, release: Release, here: str, *, joined: bool) -> Paths:
    assert release.cluster is not None
    there = WORKER if here == HEAD else HEAD
    ends = [(here, release.cluster.port, there, 40000, "01")] if joined else []
    return with_tables(root, here, ends)


def boots(release: Release, root: Path) -> None:
    links = root / "etc/systemd/system/multi-user.target.wants"
    links.mkdir(parents=True)
    (links / release.serve_unit).symlink_to("/etc/systemd/system/spark-serve@.service")


@pytest.fixture
def over() -> threading.Event:
    return threading.Event()


def wait_for(what: object, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():  # type: ignore[operator]
            return
        time.sleep(0.02)
    raise TimeoutError


def test_member_that_leaves_stops_the_engine(tmp_path: Path, over: threading.Event) -> None:
    release = pair()
    watch = watching.ClusterWatch(release, tables(tmp_path, release, HEAD, joined=True))
    watch.begin(over)
    time.sleep(0.3)
    assert watch.lost is None
    tables(tmp_path, release, HEAD, joined=False)
    wait_for(lambda: watch.lost == "spark-2 left the cluster")
    over.set()


def test_member_missing_at_the_first_sample_has_left(tmp_path: Path, over: threading.Event) -> None:
    """Systemd starts a watch after the check that all have joined."""
    release = pair()
    watch = watching.ClusterWatch(release, tables(tmp_path, release, WORKER, joined=False))
    watch.begin(over)
    wait_for(lambda: watch.lost == "spark-1 left the cluster")
    over.set()


def test_reset_forgets_missing_members(tmp_path: Path, over: threading.Event) -> None:
    release = pair()
    watch = watching.ClusterWatch(release, tables(tmp_path, release, HEAD, joined=False))
    watch.reset()
    watch.begin(over)
    time.sleep(0.4)
    over.set()
    assert watch.lost is None


def test_silent_member_stops_the_engine(
    tmp_path: Path, over: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_SILENT_S", 0.3)
    answers = [True]
    monkeypatch.setattr(watching.cluster, "can_connect", lambda *_, **__: answers[0])
    release = pair()
    watch = watching.ClusterWatch(release, tables(tmp_path, release, HEAD, joined=True))
    watch.begin(over)
    time.sleep(0.5)
    assert watch.lost is None
    answers[0] = False
    wait_for(lambda: watch.lost is not None)
    over.set()
    assert str(watch.lost).startswith("spark-2 gave no answer on the fabric for")


def test_lost_own_address_stops_the_engine(tmp_path: Path, over: threading.Event) -> None:
    release = pair()
    watch = watching.ClusterWatch(release, tables(tmp_path, release, HEAD, joined=True))
    watch.begin(over)
    time.sleep(0.2)
    with_tables(tmp_path, "192.168.1.9", [])
    wait_for(lambda: watch.lost is not None)
    over.set()
    assert "this host has 0 of its addresses" in str(watch.lost)


def test_refused_connection_counts_as_an_answer(tmp_path: Path) -> None:
    release = pair()
    watch = watching.ClusterWatch(release, tables(tmp_path, release, HEAD, joined=True))
    assert release.cluster is not None
    assert watch._find_silent() is None
    assert watch._reached == {"spark-2"}  # a refusal is an answer


def test_worker_is_proven_with_its_head(tmp_path: Path, over: threading.Event) -> None:
    release = pair()
    at_head = tables(tmp_path / "head", release, HEAD, joined=True)
    at_worker = tables(tmp_path / "worker", release, WORKER, joined=False)
    assert release.cluster is not None
    with_tables(tmp_path / "worker", WORKER, [(WORKER, 40000, HEAD, release.cluster.port, "01")])
    watching.ClusterWatch(release, at_head).begin(over)
    found: list[bool] = []
    joined = cluster.Membership(release, at_worker)
    thread = threading.Thread(
        target=lambda: found.append(cluster.wait_for_head(joined, lambda _: None).ok)
    )
    thread.start()
    time.sleep(0.8)
    assert found == []  # the head runs, but is not proven
    boots(release, tmp_path / "head")
    thread.join(10)
    over.set()
    assert found == [True]


def test_worker_fails_when_its_head_rolls_back(tmp_path: Path) -> None:
    release = pair()
    assert release.cluster is not None
    join = (WORKER, 40000, HEAD, release.cluster.port, "01")
    paths = with_tables(tmp_path, WORKER, [join])
    joined = cluster.Membership(release, paths)
    assert cluster.wait_until_joined(joined, lambda _: None).ok
    with_tables(tmp_path, WORKER, [])
    found = cluster.wait_for_head(joined, lambda _: None)
    assert (found.ok, found.detail) == (False, "spark-1 left the cluster")


def test_worker_does_not_wait_for_a_head_that_left(tmp_path: Path) -> None:
    release = pair(join_s=3)
    assert release.cluster is not None
    join = (WORKER, 40000, HEAD, release.cluster.port, "01")
    host = Host(with_tables(tmp_path, WORKER, [join]))
    host.paths.state.mkdir(parents=True)
    assert runner.check(release, host, "quick", print, "run-1", at_start=True).ok
    with_tables(tmp_path, WORKER, [])
    [found] = runner.check(release, host, "full", print, "run-1").checks
    assert (found.name, found.ok, found.detail) == ("joined", False, "spark-1 left the cluster")


def test_new_run_joins_again(tmp_path: Path) -> None:
    release = pair(join_s=0.2)
    assert release.cluster is not None
    join = (WORKER, 40000, HEAD, release.cluster.port, "01")
    host = Host(with_tables(tmp_path, WORKER, [join]))
    host.paths.state.mkdir(parents=True)
    assert runner.check(release, host, "quick", print, "run-1").ok
    with_tables(tmp_path, WORKER, [])
    [found] = runner.check(release, host, "quick", print, "run-2").checks
    assert found.detail == "spark-1 did not join within 0 s"


def test_start_without_members_times_out(tmp_path: Path) -> None:
    release = pair(join_s=0.2)
    paths = tables(tmp_path, release, WORKER, joined=False)
    found = cluster.wait_until_joined(cluster.Membership(release, paths), lambda _: None)
    assert (found.ok, found.detail) == (False, "spark-1 did not join within 0 s")


@pytest.mark.parametrize("came", [True, False])
def test_start_without_members_resets_the_start_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, came: bool
) -> None:
    asked: list[tuple[str, ...]] = []

    def systemctl(*words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(systemd, "systemctl", systemctl)
    release = pair(join_s=0.2)
    paths = tables(tmp_path, release, WORKER, joined=came)
    paths.state.mkdir(parents=True)
    found = runner.check(release, Host(paths), "quick", print, "run-1", at_start=True)
    assert next(one for one in found.checks if one.name == "joined").ok == came
    assert (("reset-failed", release.serve_unit) in asked) != came
