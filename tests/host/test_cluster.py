"""Two hosts as one server: changed, proven, lost and brought back together.

The stand-in engine keeps its ranks connected as the real one does, and notices of a rank that is
gone nothing at all: whatever happens then is done by the watches.
"""

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
    """A head and a worker, and the site that deploys them."""

    def __init__(self, root: Path):
        lab("up", HEAD, WORKER, "--fresh", "--engine", "stub")
        guests = {guest["name"]: Guest(guest["name"], guest["ip"]) for guest in info()["guests"]}
        self.head, self.worker = guests[HEAD], guests[WORKER]
        self.site = Site(root, hosts=[HEAD, WORKER])
        self.site.choose(
            model="lab-stub",
            profile="v2",
            cluster={"hosts": [HEAD, WORKER], "subnet": FABRIC, "join_s": 120},
        )

    def release(self) -> str:
        """Return the release that both run, by systemd's word."""
        assert self.head.release() == self.worker.release()
        return self.head.release()

    def status(self) -> int:
        """Return what a client of the head gets for a question."""
        return self.head.ask(CAPITAL, model="lab-model")[0]

    def wait_until_it_answers(self, seconds: float = 240) -> float:
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if self.status() == 200:
                return time.monotonic() - began
            time.sleep(1)
        raise TimeoutError("the head does not answer")

    def kill_engine(self, guest: Guest) -> None:
        """Kill every process of the engine at once, as a fault of the machine would."""
        guest.run("docker kill --signal KILL $(docker ps -q --filter label=spark.release)")

    def wait_until_it_is_closed(self) -> float:
        began = time.monotonic()
        while self.status() == 200:
            assert time.monotonic() - began < 30, "the head answers though a rank is gone"
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


def test_both_hold_one_release_and_the_head_answers_for_both(pair: Pair) -> None:
    assert pair.head.answers(CAPITAL, "Paris")
    release = pair.release()
    told = f"/etc/spark/releases/{release}/release.json"
    assert pair.head.run(f"sha256sum < {told}") == pair.worker.run(f"sha256sum < {told}")
    assert pair.head.boots() == pair.worker.boots() == [f"spark-serve@{release}.service"]
    ranks = [
        guest.argv()[guest.argv().index("--node-rank") + 1] for guest in (pair.head, pair.worker)
    ]
    assert ranks == ["0", "1"]
    assert pair.worker.argv()[-1] == "--headless"
    # Nobody is served by a worker, and nothing listens there for clients.
    assert pair.worker.run("ss -tln 'sport = :8000' | tail -n +2") == ""


def test_the_second_run_changes_nothing(pair: Pair) -> None:
    again = pair.site.deploy()
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-4000:]


def test_nobody_but_a_member_reaches_the_ports_of_the_cluster(pair: Pair) -> None:
    pair.wait_until_it_answers()
    release = pair.release()
    told = json.loads(pair.head.run(f"cat /etc/spark/releases/{release}/release.json"))
    port = told["cluster"]["port"]
    assert pair.head.run(f"ss -tlnH 'sport = :{port}'") != "", "nothing is there to be fenced"
    for number in (port, port + 1):
        with pytest.raises(TimeoutError):  # from the machine of the controller, on their network
            socket.create_connection((pair.head.ip, number), 3).close()
    pair.worker.run(f"timeout 5 bash -c '</dev/tcp/{pair.head.ip}/{port + 1}'")
    for guest in (pair.head, pair.worker):
        assert f"SPARK-{release[-12:]}" in guest.run("iptables -S INPUT")


@pytest.mark.parametrize("which", ["worker", "head"])
def test_a_rank_that_dies_closes_the_gateway_and_both_come_back(pair: Pair, which: str) -> None:
    pair.wait_until_it_answers()
    before = {guest.name: guest.unit(f"spark-serve@{pair.release()}", "InvocationID")
              for guest in (pair.head, pair.worker)}  # fmt: skip
    release = pair.release()
    pair.kill_engine(getattr(pair, which))
    pair.wait_until_it_is_closed()
    pair.wait_until_it_answers()
    assert pair.release() == release
    for guest in (pair.head, pair.worker):
        # Each of the two was started anew: half of an engine computes nothing.
        assert guest.unit(f"spark-serve@{release}", "InvocationID") != before[guest.name]


def test_a_cut_fabric_closes_the_gateway_and_its_return_brings_the_pair_back(pair: Pair) -> None:
    pair.wait_until_it_answers()
    release = pair.release()
    # Nothing goes that way any more and nobody is told, as with a cable; the controller's stays.
    pair.worker.run(f"ip route add blackhole {pair.head.ip}/32")
    try:
        pair.wait_until_it_is_closed()
    finally:
        pair.worker.run(f"ip route del blackhole {pair.head.ip}/32")
    pair.wait_until_it_answers()
    assert pair.release() == release


def test_a_power_cut_of_the_head_ends_with_the_pair_serving_again(pair: Pair) -> None:
    pair.wait_until_it_answers()
    release = pair.release()
    lab("break", "kill-guest", HEAD)
    lab("up", HEAD, "--engine", "stub")
    pair.wait_until_it_answers(400)
    assert pair.release() == release
    assert pair.head.answers(CAPITAL, "Paris")


def test_both_change_together_and_a_candidate_that_fails_leaves_both_on_the_old(pair: Pair) -> None:
    pair.wait_until_it_answers()
    old = pair.release()
    pair.site.choose(engine={"environment": {"STUB_FAULT": "garbage"}})
    bad = pair.site.deploy()
    assert bad.exit_code != 0
    assert pair.release() == old
    pair.wait_until_it_answers()
    pair.site.choose(engine={"environment": {"STUB_FAULT": ""}})
    good = pair.site.deploy()
    assert good.exit_code == 0, good.stderr[-5000:]
    assert pair.release() != old
    assert pair.head.answers(CAPITAL, "Paris")
    assert f"SPARK-{old[-12:]}" not in pair.head.run("iptables -S")


def test_a_way_back_is_gone_together(pair: Pair) -> None:
    pair.wait_until_it_answers()
    newer = pair.release()
    back = pair.site.deploy(deploy="deploys/rollback.py")
    assert back.exit_code == 0, back.stderr[-5000:]
    assert pair.release() != newer
    assert pair.head.answers(CAPITAL, "Paris")
    again = pair.site.deploy()
    assert again.exit_code == 0, again.stderr[-5000:]
    assert pair.release() == newer


@pytest.mark.parametrize("which", [WORKER, HEAD], ids=["worker", "head"])
def test_a_power_cut_in_a_change_ends_with_the_old_group(pair: Pair, which: str) -> None:
    pair.wait_until_it_answers()
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
    pair.wait_until_it_answers(400)
    assert pair.release() == old
    pair.site.choose(engine={"environment": {"STUB_FAULT": ""}})
