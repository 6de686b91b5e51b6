"""Two hosts as a single server are changed, proven, lost and restored together."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labkit import SPARE, Guest, Site, info, lab

HEAD, WORKER = SPARE[:2]
CAPITAL = "What is the capital of France?"
FABRIC = "10.77.0.0/24"

pytestmark = pytest.mark.timeout(1500)


class Pair:
    def __init__(self, root: Path):
        lab("up", HEAD, WORKER, "--fresh", "--engine", "stub")
        guests = {guest["name"]: Guest(guest["name"], guest["ip"]) for guest in info()["guests"]}
        self.head, self.worker = guests[HEAD], guests[WORKER]
        self.site = Site(root, hosts=[HEAD, WORKER])
        self.site.choose(
            model="lab-stub",
            profile="v2",
            cluster={"hosts": [HEAD, WORKER], "subnet": FABRIC},
        )

    def release(self) -> str:
        assert self.head.release() == self.worker.release()
        return self.head.release()

    def status(self) -> int:
        return self.head.ask(CAPITAL, model="lab-model")[0]

    def wait_until_open(self, seconds: float = 240) -> float:
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if self.status() == 200:
                return time.monotonic() - began
            time.sleep(1)
        raise TimeoutError("the head does not answer")

    def kill_engine(self, guest: Guest) -> None:
        guest.run("docker kill --signal KILL $(docker ps -q --filter label=spark.release)")

    def wait_until_closed(self) -> float:
        began = time.monotonic()
        while self.status() == 200:
            assert time.monotonic() - began < 30, "the head answers although a rank is gone"
            time.sleep(0.5)
        assert self.status() == 503
        return time.monotonic() - began


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    first = made.site.deploy()
    assert first.exit_code == 0, f"{first.failed}\n{first.stderr[-6000:]}"
    yield made
    lab("down", HEAD, WORKER)


def test_both_have_one_release_and_head_answers(pair: Pair) -> None:
    assert pair.head.answers()
    release = pair.release()
    path = f"/etc/spark/releases/{release}/release.json"
    assert pair.head.run(f"sha256sum < {path}") == pair.worker.run(f"sha256sum < {path}")
    assert pair.head.boots() == pair.worker.boots() == [f"spark-serve@{release}.service"]
    ranks = [
        guest.argv()[guest.argv().index("--node-rank") + 1] for guest in (pair.head, pair.worker)
    ]
    assert ranks == ["0", "1"]
    assert pair.worker.argv()[-1] == "--headless"
    # A worker serves no clients.
    assert pair.worker.run("ss -tln 'sport = :8000' | tail -n +2") == ""


def test_second_run_changes_nothing(pair: Pair) -> None:
    pair.site.deploy().assert_unchanged()


def test_only_members_reach_cluster_ports(pair: Pair) -> None:
    pair.wait_until_open()
    release = pair.release()
    document = json.loads(pair.head.run(f"cat /etc/spark/releases/{release}/release.json"))
    port = document["cluster"]["port"]
    assert pair.head.run(f"ss -tlnH 'sport = :{port}'") != "", "no listener to protect"
    for number in (port, port + 1):
        with pytest.raises(TimeoutError):  # from the controller, on the same network
            socket.create_connection((pair.head.ip, number), 3).close()
    pair.worker.run(f"timeout 5 bash -c '</dev/tcp/{pair.head.ip}/{port + 1}'")
    for guest in (pair.head, pair.worker):
        assert f"SPARK-{release[-12:]}" in guest.run("iptables -S INPUT")


@pytest.mark.parametrize("which", ["worker", "head"])
def test_dead_rank_closes_gateway_and_both_restart(pair: Pair, which: str) -> None:
    pair.wait_until_open()
    before = {guest.name: guest.unit(f"spark-serve@{pair.release()}", "InvocationID")
              for guest in (pair.head, pair.worker)}  # fmt: skip
    release = pair.release()
    pair.kill_engine(getattr(pair, which))
    pair.wait_until_closed()
    pair.wait_until_open()
    assert pair.release() == release
    for guest in (pair.head, pair.worker):
        # Both were restarted.
        assert guest.unit(f"spark-serve@{release}", "InvocationID") != before[guest.name]


def test_lost_fabric_closes_gateway_until_it_returns(pair: Pair) -> None:
    pair.wait_until_open()
    release = pair.release()
    # Packets are dropped silently, as with a pulled cable; the controller still reaches both.
    pair.worker.run(f"ip route add blackhole {pair.head.ip}/32")
    try:
        pair.wait_until_closed()
    finally:
        pair.worker.run(f"ip route del blackhole {pair.head.ip}/32")
    pair.wait_until_open()
    assert pair.release() == release


def test_pair_serves_again_after_power_cut_of_head(pair: Pair) -> None:
    pair.wait_until_open()
    release = pair.release()
    lab("break", "kill-guest", HEAD)
    lab("up", HEAD, "--engine", "stub")
    pair.wait_until_open(400)
    assert pair.release() == release
    assert pair.head.answers()


def test_failed_candidate_leaves_both_on_old_release(pair: Pair) -> None:
    pair.wait_until_open()
    old = pair.release()
    pair.site.choose(engine={"environment": {"STUB_FAULT": "garbage"}})
    bad = pair.site.deploy()
    assert bad.exit_code != 0
    assert pair.release() == old
    pair.wait_until_open()
    pair.site.choose(engine={"environment": {"STUB_FAULT": ""}})
    good = pair.site.deploy()
    assert good.exit_code == 0, good.stderr[-5000:]
    assert pair.release() != old
    assert pair.head.answers()
    assert f"SPARK-{old[-12:]}" not in pair.head.run("iptables -S")


def test_both_roll_back_together(pair: Pair) -> None:
    pair.wait_until_open()
    newer = pair.release()
    back = pair.site.deploy(deploy="deploys/rollback.py")
    assert back.exit_code == 0, back.stderr[-5000:]
    assert pair.release() != newer
    assert pair.head.answers()
    again = pair.site.deploy()
    assert again.exit_code == 0, again.stderr[-5000:]
    assert pair.release() == newer


@pytest.mark.parametrize("which", [WORKER, HEAD], ids=["worker", "head"])
def test_power_cut_during_rollout_restores_old_release(pair: Pair, which: str) -> None:
    pair.wait_until_open()
    old = pair.release()
    pair.site.choose(engine={"environment": {"STUB_FAULT": "never-ready"}})
    run: list[int] = []
    deploy = threading.Thread(target=lambda: run.append(pair.site.deploy().exit_code))
    deploy.start()
    pair.worker.wait(
        "systemctl is-active 'spark-switch@*' | grep -q activating && "
        "systemctl list-units --plain --state=active 'spark-serve@*' "
        f"| grep -v {old} | grep spark-serve",
        seconds=200,
    )
    lab("break", "kill-guest", which)
    lab("up", which, "--engine", "stub")
    deploy.join(600)
    assert run
    assert run[0] != 0
    pair.wait_until_open(400)
    assert pair.release() == old
    pair.site.choose(engine={"environment": {"STUB_FAULT": ""}})
