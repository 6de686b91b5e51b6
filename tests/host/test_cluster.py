import socket
import threading
import time
from contextlib import contextmanager

import pytest

from tests.labkit import SPARE, Guest, Site, guest_named, lab

HEAD, WORKER = SPARE[:2]

pytestmark = pytest.mark.timeout(1500)


class Cluster:
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
def cluster(tmp_path_factory):
    new_cluster = Cluster(tmp_path_factory.mktemp("site"), "stub", model="lab-stub", profile="v2")
    new_cluster.site.deploy().assert_succeeded()
    yield new_cluster
    lab("down", HEAD, WORKER)


def test_cluster_members_run_one_release_and_the_head_answers(cluster):
    assert cluster.head.answers()
    release = cluster.release()
    path = f"/etc/spark/releases/{release}/release.json"
    assert cluster.head.run(f"sha256sum < {path}") == cluster.worker.run(f"sha256sum < {path}")
    assert cluster.head.boots() == cluster.worker.boots() == [f"spark-serve@{release}.service"]
    for guest, rank in zip(cluster.guests, "01", strict=True):
        argv = guest.argv()
        assert argv[argv.index("--node-rank") + 1] == rank
    assert argv[-1] == "--headless"
    assert cluster.worker.run("ss -tln 'sport = :8000' | tail -n +2") == ""


def test_second_cluster_deploy_changes_nothing(cluster):
    cluster.site.deploy().assert_unchanged()


def test_only_members_can_connect_to_cluster_ports(cluster):
    cluster.wait_until_open()
    release, port = cluster.release(), cluster.head.release_document()["cluster"]["port"]
    assert cluster.head.run(f"ss -tlnH 'sport = :{port}'") != "", "no listener to protect"
    for number in (port, port + 1):
        with pytest.raises(TimeoutError):
            socket.create_connection((cluster.head.ip, number), 3).close()
    cluster.worker.run(f"timeout 5 bash -c '</dev/tcp/{cluster.head.ip}/{port + 1}'")
    for guest in cluster.guests:
        assert f"SPARK-{release[-12:]}" in guest.run("iptables -S INPUT")


@pytest.mark.parametrize("rank", ["worker", "head"])
def test_gateway_closes_and_both_ranks_restart_if_one_rank_dies(cluster, rank):
    cluster.wait_until_open()
    release, before = cluster.release(), [guest.invocation() for guest in cluster.guests]
    guest: Guest = getattr(cluster, rank)
    guest.run("docker kill --signal KILL $(docker ps -q --filter label=spark.release)")
    cluster.wait_until_closed()
    assert cluster.status() == 503
    cluster.wait_until_open()
    assert cluster.release() == release
    for guest, invocation in zip(cluster.guests, before, strict=True):
        assert guest.invocation() != invocation


def test_gateway_is_closed_while_the_fabric_is_down(cluster):
    cluster.wait_until_open()
    release = cluster.release()
    with cluster.lost_fabric():
        cluster.wait_until_closed()
        assert cluster.status() == 503
    cluster.wait_until_open()
    assert cluster.release() == release


def test_cluster_recovers_after_head_loses_power(cluster):
    cluster.wait_until_open()
    release = cluster.release()
    cluster.head.power_cut()
    cluster.wait_until_open(400)
    assert cluster.release() == release
    assert cluster.head.answers()


def test_failed_candidate_leaves_both_members_on_old_release(cluster):
    cluster.wait_until_open()
    old = cluster.release()
    cluster.choose_fault("garbage")
    assert cluster.site.deploy().exit_code != 0
    assert cluster.release() == old
    cluster.wait_until_open()
    cluster.choose_fault("")
    cluster.site.deploy().assert_succeeded()
    assert cluster.release() != old
    assert cluster.head.answers()
    assert f"SPARK-{old[-12:]}" not in cluster.head.run("iptables -S")


def test_both_members_roll_back_together(cluster):
    cluster.wait_until_open()
    newer = cluster.release()
    cluster.site.deploy(deploy="deploys/rollback.py").assert_succeeded()
    assert cluster.release() != newer
    assert cluster.head.answers()
    cluster.site.deploy().assert_succeeded()
    assert cluster.release() == newer


@pytest.mark.parametrize("rank", ["worker", "head"])
def test_power_cut_during_rollout_leaves_cluster_on_old_release(cluster, rank):
    cluster.wait_until_open()
    old = cluster.release()
    cluster.choose_fault("never-ready")
    exit_codes: list[int] = []
    deploy = threading.Thread(target=lambda: exit_codes.append(cluster.site.deploy().exit_code))
    deploy.start()
    cluster.worker.wait(
        "systemctl is-active 'spark-switch@*' | grep -q activating && "
        "systemctl list-units --plain --state=active 'spark-serve@*' "
        f"| grep -v {old} | grep spark-serve",
        seconds=200,
    )
    guest: Guest = getattr(cluster, rank)
    guest.power_cut()
    deploy.join(600)
    assert exit_codes not in ([], [0])
    cluster.wait_until_open(400)
    assert cluster.release() == old
    cluster.choose_fault("")
