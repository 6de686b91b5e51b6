"""Releases of a cluster, and the kernel's network tables of its members."""

import ipaddress
from pathlib import Path

from spark_contract.documents import read
from spark_contract.paths import Paths
from spark_contract.release import Release
from stub_host import release_data

HEAD, WORKER = "192.168.100.10", "192.168.100.11"
PORT = 29533
Connection = tuple[str, int, str, int, str]


def _member(host: str, address: str, rank: int) -> dict[str, object]:
    return {
        "host": host, "address": address, "env": {"VLLM_HOST_IP": address},
        "argv": ["--nnodes", "2", "--node-rank", str(rank), *["--headless"][:rank]],
        "docker_args": ["--device=/dev/infiniband"],
    }  # fmt: skip


def cluster_release() -> Release:
    members = [_member("spark-1", HEAD, 0), _member("spark-2", WORKER, 1)]
    cluster = {"members": members, "port": PORT, "join_s": 60}
    return read(Release, {**release_data(), "cluster": cluster})


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
