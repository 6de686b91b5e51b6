import dataclasses
import ipaddress
import socket
import threading
import time
from pathlib import Path

import pytest
from spark_contract.documents import read
from spark_contract.paths import Paths
from spark_contract.release import Release
from spark_contract.tool import HostToolError
from spark_host.check import runner
from spark_host.engine import container
from spark_host.system import cluster, docker
from spark_host.system.host import Host
from spark_host.watch import watchdog
from spark_host.watch.watchdog import ClusterWatch
from stub_host import failed, release_data, wait_until, write_program

HEAD, WORKER = "192.168.100.10", "192.168.100.11"
PORT = 29533
Connection = tuple[str, int, str, int, str]


def _member(host: str, address: str, rank: int) -> dict[str, object]:
    return {
        "host": host, "address": address, "env": {"VLLM_HOST_IP": address},
        "argv": ["--nnodes", "2", "--node-rank", str(rank), *["--headless"][:rank]],
        "docker_args": ["--device=/dev/infiniband"],
    }  # fmt: skip


def cluster_release(head: str = HEAD, worker: str = WORKER, **changes: object) -> Release:
    members = [_member("spark-1", head, 0), _member("spark-2", worker, 1)]
    cluster = {"members": members, "port": PORT, "join_s": 60, **changes}
    return read(Release, release_data(cluster=cluster, watch__interval_s=0.05))


def in_hex(address: str, port: int) -> str:
    number = int.from_bytes(ipaddress.IPv4Address(address).packed, "little")
    return f"{number:08X}:{port:04X}"


def write_tables(root: Path, address: str, *connections: Connection) -> Paths:
    net = root / "proc/net"
    net.mkdir(parents=True, exist_ok=True)
    (net / "fib_trie").write_text(
        "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 127.0.0.1\n        /32 host LOCAL\n"
        f"     |-- {address}\n        /32 host LOCAL\n     |-- 192.168.100.255\n"
        "        /32 link BROADCAST\n"
    )
    title = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt\n"
    lines = [
        f"   0: {in_hex(local, port)} {in_hex(remote, remote_port)} {state} "
        "00000000:00000000 00:00000000\n"
        for local, port, remote, remote_port, state in connections
    ]
    (net / "tcp").write_text(title + "".join(lines))
    (net / "tcp6").write_text(title)
    return Paths(root)


@pytest.mark.parametrize(("address", "rank"), [(HEAD, 0), (WORKER, 1)])
def test_member_address_determines_the_rank(tmp_path, address, rank):
    paths = write_tables(tmp_path, address)
    assert cluster.rank(cluster_release(), paths) == rank
    assert cluster.is_worker(cluster_release(), paths) == bool(rank)
    alone = read(Release, release_data())
    assert (cluster.rank(alone, paths), cluster.local_member(alone, paths)) == (0, None)
    assert cluster.missing_members(alone, paths) == []


@pytest.mark.parametrize(
    ("address", "connections", "missing"),
    [
        (HEAD, [], ["spark-2"]),
        (HEAD, [(HEAD, PORT, WORKER, 40000, "01")], []),
        (WORKER, [(WORKER, 40000, HEAD, PORT, "01")], []),
        (WORKER, [], ["spark-1"]),
        (WORKER, [(WORKER, 40000, HEAD, PORT, "02")], ["spark-1"]),
        (WORKER, [(WORKER, 40000, HEAD, PORT, "08")], ["spark-1"]),
        (WORKER, [(WORKER, 40000, HEAD, PORT + 2, "01")], ["spark-1"]),
    ],
)
def test_members_with_a_connection_to_the_head_have_joined(tmp_path, address, connections, missing):
    paths = write_tables(tmp_path, address, *connections)
    members = cluster.missing_members(cluster_release(), paths)
    assert [member.host for member in members] == missing


def test_reads_tcp6_connections(tmp_path):
    paths = write_tables(tmp_path, HEAD)
    local, remote = (f"{'0' * 16}FFFF0000{in_hex(*end)}" for end in ((HEAD, PORT), (WORKER, 9)))
    table = tmp_path / "proc/net/tcp6"
    table.write_text(f"{table.read_text()}   0: {local} {remote} 01 00000000:00000000\n")
    assert cluster.missing_members(cluster_release(), paths) == []


def test_container_gets_the_member_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(docker, "gpu_arguments", lambda paths: [])
    paths = write_tables(tmp_path, WORKER)
    argv = container.docker_argv(cluster_release(), paths)
    assert "--device=/dev/infiniband" in argv[: argv.index("spark-vllm:stub")]
    assert argv[-5:] == ["--nnodes", "2", "--node-rank", "1", "--headless"]
    container.write_environment(cluster_release(), paths)
    assert (
        f"VLLM_HOST_IP={WORKER}\n" in paths.engine_environment(cluster_release().name).read_text()
    )


# Records its arguments; fails for those in $HERE/refuses.
IPTABLES = """
echo "${0##*/} $*" >> $HERE/calls
[ -e $HERE/refuses ] || exit 0
case "$*" in *"$(cat $HERE/refuses)"*) echo "No chain by that name." >&2; exit 1;; esac
"""
CHAIN = f"SPARK-{cluster_release().name[-12:]}"


@pytest.fixture
def firewall(tmp_path, monkeypatch):
    for name in ("iptables", "ip6tables"):
        write_program(tmp_path / name, IPTABLES.replace("$HERE", str(tmp_path)))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(cluster, "load_release", lambda name, paths: cluster_release())
    return tmp_path


def rules(firewall, program):
    prefix = f"{program} -w 5 "
    lines = (firewall / "calls").read_text().splitlines()
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def test_cluster_firewall_accepts_only_members_and_loopback(firewall):
    cluster.fence(["up", "any"], Paths(firewall))
    jump = f"INPUT -p tcp --dport {PORT}:{PORT + 1} -j {CHAIN}"
    removed = [f"-D {jump}", f"-F {CHAIN}", f"-X {CHAIN}"]
    assert rules(firewall, "iptables") == [
        *removed, f"-N {CHAIN}", f"-A {CHAIN} -i lo -j RETURN", f"-A {CHAIN} -s {HEAD} -j RETURN",
        f"-A {CHAIN} -s {WORKER} -j RETURN", f"-A {CHAIN} -j DROP", f"-I {jump}",
    ]  # fmt: skip
    # The store listens on IPv6, too, and no member uses it.
    assert rules(firewall, "ip6tables") == [
        *removed, f"-N {CHAIN}", f"-A {CHAIN} -i lo -j RETURN", f"-A {CHAIN} -j DROP", f"-I {jump}",
    ]  # fmt: skip
    assert len(CHAIN) < 29, "the kernel's limit"


def test_firewall_removal_ignores_missing_rules(firewall):
    (firewall / "refuses").write_text("-")
    cluster.fence(["down", "any"], Paths(firewall))
    assert [rule.split()[0] for rule in rules(firewall, "iptables")] == ["-D", "-F", "-X"]


def test_single_host_gets_no_cluster_firewall(firewall, monkeypatch):
    release = dataclasses.replace(cluster_release(), cluster=None)
    monkeypatch.setattr(cluster, "load_release", lambda name, paths: release)
    cluster.fence(["up", "any"], Paths(firewall))
    assert not (firewall / "calls").exists()


def test_iptables_failure_is_reported(firewall):
    (firewall / "refuses").write_text("-N")
    message = r"can still reach the cluster's ports \(No chain by that name.*firewall"
    with pytest.raises(HostToolError, match=message):
        cluster.fence(["up", "any"], Paths(firewall))
    with pytest.raises(HostToolError, match="fence up RELEASE"):
        cluster.fence(["sideways"], Paths(firewall))


LOCAL_HEAD, LOCAL_WORKER = "127.0.0.2", "127.0.0.3"


class Pair:
    """A release of two members on this machine, and the state of one of them."""

    def __init__(self, root, address=LOCAL_HEAD, **changes):
        self.root, self.address, self.paths = root, address, Paths(root)
        with socket.socket() as free:
            free.bind((LOCAL_HEAD, 0))
            port = int(free.getsockname()[1]) - 1
        self.release = cluster_release(LOCAL_HEAD, LOCAL_WORKER, port=port, **changes)
        self.port = port

    def joined(self, joined=True):
        head = (LOCAL_HEAD, self.port)
        worker = (LOCAL_WORKER, 40000)
        ends = (*head, *worker) if self.address == LOCAL_HEAD else (*worker, *head)
        return write_tables(self.root, self.address, *([(*ends, "01")] if joined else []))

    def check(self, level, run="run-1", *, at_start=False):
        self.paths.state.mkdir(parents=True, exist_ok=True)
        host = Host(self.paths)
        return runner.check(self.release, host, level, print, run, at_start=at_start)


@pytest.fixture
def stop():
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize(
    ("address", "lost"),
    [(LOCAL_HEAD, "spark-2 left the cluster"), (LOCAL_WORKER, "spark-1 left the cluster")],
)
@pytest.mark.parametrize("at_first", [True, False])
def test_engine_stops_if_a_cluster_member_leaves(tmp_path, stop, address, lost, at_first):
    pair = Pair(tmp_path, address)
    watch = ClusterWatch(pair.release, pair.joined(not at_first))
    watch.begin(stop)
    if not at_first:
        time.sleep(0.3)
        assert watch.problem is None
        pair.joined(False)
    wait_until(lambda: watch.problem == lost, "the loss is noticed")


def test_restarted_watcher_waits_for_members_again(tmp_path, stop):
    pair = Pair(tmp_path)
    watch = ClusterWatch(pair.release, pair.joined(False))
    watch.reset()
    watch.begin(stop)
    time.sleep(0.4)
    assert watch.problem is None


def test_engine_stops_if_a_cluster_member_does_not_respond(tmp_path, stop, monkeypatch):
    monkeypatch.setattr(watchdog, "_SILENCE_LIMIT_S", 0.3)
    connects = True
    monkeypatch.setattr(cluster, "responds", lambda *_, **__: connects)
    pair = Pair(tmp_path)
    watch = ClusterWatch(pair.release, pair.joined())
    watch.begin(stop)
    time.sleep(0.5)
    assert watch.problem is None
    connects = False
    wait_until(lambda: watch.problem, "the silence is noticed")
    assert str(watch.problem).startswith("spark-2 has not responded on the fabric for")


def test_engine_stops_if_the_fabric_address_is_lost(tmp_path, stop):
    pair = Pair(tmp_path)
    watch = ClusterWatch(pair.release, pair.joined())
    watch.begin(stop)
    time.sleep(0.2)
    write_tables(tmp_path, "192.168.1.9")
    wait_until(lambda: watch.problem, "the missing address is noticed")
    assert "but has 0" in str(watch.problem)


def test_member_that_refuses_connections_counts_as_responding(tmp_path):
    pair = Pair(tmp_path)
    watch = ClusterWatch(pair.release, pair.joined())
    assert watch._find_unresponsive() is None
    assert watch._reached == {"spark-2"}


def test_worker_is_proven_together_with_its_head(tmp_path, stop):
    head = Pair(tmp_path / "head")
    to_head = (LOCAL_WORKER, 40000, LOCAL_HEAD, head.port, "01")
    worker_paths = write_tables(tmp_path / "worker", LOCAL_WORKER, to_head)
    ClusterWatch(head.release, head.joined()).begin(stop)
    results: list[bool] = []
    membership = runner.Membership(head.release, worker_paths)
    thread = threading.Thread(
        target=lambda: results.append(runner.wait_for_head(membership, lambda _: None).ok)
    )
    thread.start()
    time.sleep(0.8)
    assert results == []
    links = tmp_path / "head/etc/systemd/system/multi-user.target.wants"
    links.mkdir(parents=True)
    (links / head.release.serve_unit).symlink_to("/etc/systemd/system/spark-serve@.service")
    thread.join(10)
    assert results == [True]


def test_worker_fails_when_its_head_leaves(tmp_path):
    pair = Pair(tmp_path, LOCAL_WORKER)
    membership = runner.Membership(pair.release, pair.joined())
    assert runner.wait_until_joined(membership, lambda _: None).ok
    pair.joined(False)
    finding = runner.wait_for_head(membership, lambda _: None)
    assert (finding.ok, finding.detail) == (False, "spark-1 left the cluster")


def test_worker_waits_for_its_head_once_per_engine_run(tmp_path):
    pair = Pair(tmp_path, LOCAL_WORKER, join_s=0.2)
    pair.joined()
    assert pair.check("quick", at_start=True).ok
    pair.joined(False)
    assert failed(pair.check("full")) == {"joined": "spark-1 left the cluster"}
    assert failed(pair.check("quick", "run-2")) == {"joined": "spark-1 did not join within 0 s"}


@pytest.mark.parametrize("joined", [True, False])
def test_start_that_waits_for_members_resets_the_start_limit(tmp_path, systemctl_calls, joined):
    pair = Pair(tmp_path, LOCAL_WORKER, join_s=0.2)
    pair.joined(joined)
    result = pair.check("quick", at_start=True)
    findings = {finding.name: finding.ok for finding in result.checks}
    assert findings["joined"] == joined
    assert (("reset-failed", pair.release.serve_unit) in systemctl_calls) != joined
