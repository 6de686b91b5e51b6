import socket
import threading
import time
from contextlib import contextmanager

import pytest

from tests.labkit import SPARE, Guest, Site, guest_named, lab

HEAD, WORKER = SPARE[:2]

pytestmark = pytest.mark.timeout(1500)


class Pair:
    def __init__(self, root, engine, **choices):
        lab("up", HEAD, WORKER, "--fresh", "--engine", engine)
        self.head, self.worker = guest_named(HEAD), guest_named(WORKER)
        self.guests = (self.head, self.worker)
        self.site = Site(root, hosts=[HEAD, WORKER])
        self.site.choose(cluster={"hosts": [HEAD, WORKER], "subnet": "10.77.0.0/24"}, **choices)

    def release(self):
        assert self.head.release() == self.worker.release()
        return self.head.release()

    def choose_fault(self, fault):
        self.site.choose(engine={"environment": {"STUB_FAULT": fault}})

    def status(self):
        return self.head.ask(model="lab-model")[0]

    def wait_until_open(self, seconds=240):
        deadline = time.monotonic() + seconds
        while self.status() != 200:
            assert time.monotonic() < deadline, "the head does not answer"
            time.sleep(1)

    def wait_until_closed(self, seconds=30):
        began = time.monotonic()
        while self.status() == 200:
            assert time.monotonic() - began < seconds, "the head answers although a rank is gone"
            time.sleep(0.5)
        return time.monotonic() - began

    @contextmanager
    def lost_fabric(self):
        """Drop packets silently, as with a pulled cable; the controller still reaches both."""
        self.worker.run(f"ip route add blackhole {self.head.ip}/32")
        try:
            yield
        finally:
            self.worker.run(f"ip route del blackhole {self.head.ip}/32")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    new_pair = Pair(tmp_path_factory.mktemp("pair"), "stub", model="lab-stub", profile="v2")
    new_pair.site.deploy().assert_succeeded()
    yield new_pair
    lab("down", HEAD, WORKER)


def test_both_members_have_the_same_release_and_head_answers(pair):
    assert pair.head.answers()
    release = pair.release()
    path = f"/etc/spark/releases/{release}/release.json"
    assert pair.head.run(f"sha256sum < {path}") == pair.worker.run(f"sha256sum < {path}")
    assert pair.head.boots() == pair.worker.boots() == [f"spark-serve@{release}.service"]
    for guest, rank in zip(pair.guests, "01", strict=True):
        argv = guest.argv()
        assert argv[argv.index("--node-rank") + 1] == rank
    assert argv[-1] == "--headless"
    assert pair.worker.run("ss -tln 'sport = :8000' | tail -n +2") == ""


def test_second_cluster_deploy_changes_nothing(pair):
    pair.site.deploy().assert_unchanged()


def test_only_members_can_connect_to_cluster_ports(pair):
    pair.wait_until_open()
    release, port = pair.release(), pair.head.release_document()["cluster"]["port"]
    assert pair.head.run(f"ss -tlnH 'sport = :{port}'") != "", "no listener to protect"
    for number in (port, port + 1):
        with pytest.raises(TimeoutError):
            socket.create_connection((pair.head.ip, number), 3).close()
    pair.worker.run(f"timeout 5 bash -c '</dev/tcp/{pair.head.ip}/{port + 1}'")
    for guest in pair.guests:
        assert f"SPARK-{release[-12:]}" in guest.run("iptables -S INPUT")


@pytest.mark.parametrize("rank", ["worker", "head"])
def test_dead_rank_closes_gateway_and_both_ranks_restart(pair, rank):
    pair.wait_until_open()
    release, before = pair.release(), [guest.invocation() for guest in pair.guests]
    guest: Guest = getattr(pair, rank)
    guest.run("docker kill --signal KILL $(docker ps -q --filter label=spark.release)")
    pair.wait_until_closed()
    assert pair.status() == 503
    pair.wait_until_open()
    assert pair.release() == release
    for guest, invocation in zip(pair.guests, before, strict=True):
        assert guest.invocation() != invocation


def test_gateway_is_closed_while_the_fabric_is_down(pair):
    pair.wait_until_open()
    release = pair.release()
    with pair.lost_fabric():
        pair.wait_until_closed()
        assert pair.status() == 503
    pair.wait_until_open()
    assert pair.release() == release


def test_cluster_serves_again_after_power_cut_of_head(pair):
    pair.wait_until_open()
    release = pair.release()
    pair.head.power_cut()
    pair.wait_until_open(400)
    assert pair.release() == release
    assert pair.head.answers()


def test_failed_candidate_leaves_both_members_on_old_release(pair):
    pair.wait_until_open()
    old = pair.release()
    pair.choose_fault("garbage")
    assert pair.site.deploy().exit_code != 0
    assert pair.release() == old
    pair.wait_until_open()
    pair.choose_fault("")
    pair.site.deploy().assert_succeeded()
    assert pair.release() != old
    assert pair.head.answers()
    assert f"SPARK-{old[-12:]}" not in pair.head.run("iptables -S")


def test_both_members_roll_back_together(pair):
    pair.wait_until_open()
    newer = pair.release()
    pair.site.deploy(deploy="deploys/rollback.py").assert_succeeded()
    assert pair.release() != newer
    assert pair.head.answers()
    pair.site.deploy().assert_succeeded()
    assert pair.release() == newer


@pytest.mark.parametrize("rank", ["worker", "head"])
def test_power_cut_during_rollout_leaves_cluster_on_old_release(pair, rank):
    pair.wait_until_open()
    old = pair.release()
    pair.choose_fault("never-ready")
    exit_codes: list[int] = []
    deploy = threading.Thread(target=lambda: exit_codes.append(pair.site.deploy().exit_code))
    deploy.start()
    pair.worker.wait(
        "systemctl is-active 'spark-switch@*' | grep -q activating && "
        "systemctl list-units --plain --state=active 'spark-serve@*' "
        f"| grep -v {old} | grep spark-serve",
        seconds=200,
    )
    guest: Guest = getattr(pair, rank)
    guest.power_cut()
    deploy.join(600)
    assert exit_codes not in ([], [0])
    pair.wait_until_open(400)
    assert pair.release() == old
    pair.choose_fault("")
