"""The members of a cluster, as one of them sees the others: from the kernel's tables alone.

The engine's ranks keep connections to the port of their head for as long as they run, and the
kernel ends them with the process that holds them. So who has joined, and who has gone, is read
there; no member tells another anything.
"""

from __future__ import annotations

import ipaddress
import re

from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.release import Member, Release

_ESTABLISHED = "01"
_LOCAL = re.compile(r"\|-- ([0-9.]+)\n\s+/32 host LOCAL")


def rank(release: Release, paths: Paths) -> int:
    """Return which member this host is; 0, too, where it serves alone.

    Raises:
        HostToolError: It has the address of none of them.
    """
    if release.cluster is None:
        return 0
    ours = set(_LOCAL.findall(paths.below("/proc/net/fib_trie").read_text()))
    members = release.cluster.members
    found = [number for number, one in enumerate(members) if one.address in ours]
    if len(found) != 1:
        named = ", ".join(f"{one.host} {one.address}" for one in members)
        raise HostToolError(
            f"cluster of {release.name}",
            f"this host has {len(found)} of its addresses ({named})",
            "give the fabric its addresses back, or deploy all members again",
        )
    return found[0]


def own(release: Release, paths: Paths) -> Member | None:
    """Return what this host's rank is told beside the rest; ``None`` where it serves alone."""
    if release.cluster is None:
        return None
    return release.cluster.members[rank(release, paths)]


def is_worker(release: Release, paths: Paths) -> bool:
    """Return whether this host computes for another, which answers."""
    return release.cluster is not None and rank(release, paths) > 0


def missing(release: Release, paths: Paths) -> list[Member]:
    """Return the members whose engines are not joined with the one here.

    The head sees every other, a worker only the head.
    """
    cluster = release.cluster
    if cluster is None:
        return []
    others = cluster.members[1:] if rank(release, paths) == 0 else cluster.members[:1]
    joined = _joined(cluster.port, paths)
    return [one for one in others if one.address not in joined]


def _joined(port: int, paths: Paths) -> set[str]:
    """Return the other ends of what is connected through the port of a head, here or there."""
    found = set()
    for name in ("tcp", "tcp6"):
        table = paths.below(f"/proc/net/{name}")
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for _, local, remote, state, *_ in (line.split(maxsplit=4) for line in lines):
            ports = {int(end.rpartition(":")[2], 16) for end in (local, remote)}
            if state == _ESTABLISHED and port in ports:
                found.add(_address(remote.rpartition(":")[0]))
    return found


def _address(digits: str) -> str:
    """Return the address in four bytes, or the last four of sixteen, in the host's order."""
    number = int.from_bytes(bytes.fromhex(digits[-8:]), "little")
    return str(ipaddress.IPv4Address(number))
