"""Rank and members of a cluster from the kernel's tables."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
from spark_contract.documents import read
from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.release import Release
from spark_host.engine import container
from spark_host.system import cluster, docker
from stub_host import release_data

HEAD, WORKER = "192.168.100.10", "192.168.100.11"
PORT = 29533


def member(host: str, address: str, rank: int) -> dict[str, object]:
    return {
        "host": host, "address": address, "env": {"VLLM_HOST_IP": address},
        "argv": ["--nnodes", "2", "--node-rank", str(rank), *["--headless"][:rank]],
        "docker_args": ["--device=/dev/infiniband"],
    }  # fmt: skip


def clustered() -> Release:
    cluster = {
        "members": [member("spark-1", HEAD, 0), member("spark-2", WORKER, 1)],
        "port": PORT, "join_s": 60,
    }  # fmt: skip
    return read(Release, {**release_data(), "cluster": cluster})


def digits(address: str, port: int) -> str:
    number = int.from_bytes(ipaddress.IPv4Address(address).packed, "little")
    return f"{number:08X}:{port:04X}"


def with_tables(
    root: Path, address: str, connections: list[tuple[str, int, str, int, str]]
) -> Paths:
    net = root / "proc/net"
    net.mkdir(parents=True, exist_ok=True)
    (net / "fib_trie").write_text(
        "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 127.0.0.1\n        /32 host LOCAL\n"
        f"     |-- {address}\n        /32 host LOCAL\n     |-- 192.168.100.255\n"
        "        /32 link BROADCAST\n"
    )
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt\n"
    lines = [
        f"   0: {digits(*one[:2])} {digits(*one[2:4])} {one[4]} 00000000:00000000 00:00000000\n"
        for one in connections
    ]
    (net / "tcp").write_text(head + "".join(lines))
    (net / "tcp6").write_text(head)
    return Paths(root)


@pytest.mark.parametrize(("address", "rank"), [(HEAD, 0), (WORKER, 1)])
def test_rank_follows_the_address(tmp_path: Path, address: str, rank: int) -> None:
    paths = with_tables(tmp_path, address, [])
    assert cluster.rank(clustered(), paths) == rank
    assert cluster.is_worker(clustered(), paths) == bool(rank)


def test_host_without_member_address_is_refused(tmp_path: Path) -> None:
    paths = with_tables(tmp_path, "192.168.100.99", [])
    with pytest.raises(HostToolError, match=f"0 of its addresses .*spark-2 {WORKER}"):
        cluster.rank(clustered(), paths)


def test_rank_is_0_without_cluster(tmp_path: Path) -> None:
    alone, paths = read(Release, release_data()), Paths(tmp_path)
    assert cluster.rank(alone, paths) == 0
    assert cluster.own_member(alone, paths) is None
    assert cluster.missing_members(alone, paths) == []


@pytest.mark.parametrize(
    ("here", "connections", "missing"),
    [
        (HEAD, [], ["spark-2"]),
        (HEAD, [(HEAD, PORT, WORKER, 40000, "01")], []),
        (WORKER, [(WORKER, 40000, HEAD, PORT, "01")], []),
        (WORKER, [], ["spark-1"]),
        # Not established, closing, and to the port of another release.
        (WORKER, [(WORKER, 40000, HEAD, PORT, "02")], ["spark-1"]),
        (WORKER, [(WORKER, 40000, HEAD, PORT, "08")], ["spark-1"]),
        (WORKER, [(WORKER, 40000, HEAD, PORT + 2, "01")], ["spark-1"]),
    ],
)
def test_joined_members_have_a_connection_to_the_head(
    tmp_path: Path, here: str, connections: list[tuple[str, int, str, int, str]], missing: list[str]
) -> None:
    paths = with_tables(tmp_path, here, connections)
    assert [one.host for one in cluster.missing_members(clustered(), paths)] == missing


def test_reads_connections_of_tcp6(tmp_path: Path) -> None:
    paths = with_tables(tmp_path, HEAD, [])
    local, remote = (f"{'0' * 16}FFFF0000{digits(*end)}" for end in ((HEAD, PORT), (WORKER, 9)))
    table = tmp_path / "proc/net/tcp6"
    table.write_text(f"{table.read_text()}   0: {local} {remote} 01 00000000:00000000\n")
    assert cluster.missing_members(clustered(), paths) == []


def test_container_gets_the_member_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "gpu_arguments", lambda paths: [])
    paths = with_tables(tmp_path, WORKER, [])
    argv = container.docker_argv(clustered(), paths)
    image = argv.index("spark-vllm:stub")
    assert "--device=/dev/infiniband" in argv[:image]
    assert argv[-5:] == ["--nnodes", "2", "--node-rank", "1", "--headless"]
    container.write_environment(clustered(), paths)
    assert f"VLLM_HOST_IP={WORKER}\n" in paths.engine_environment(clustered().name).read_text()
