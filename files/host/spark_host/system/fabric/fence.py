"""Lets the members of a cluster alone reach its ports: the engine's store listens everywhere.

By the program that docker needs as well. A host that refuses it serves nevertheless, and its
journal says what stays open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.release import Cluster, Release

from spark_host.system.programs import finished
from spark_host.system.stored import load

_LIMIT_S = 10.0
_WAIT = ("-w", "5")  # for another program that changes rules


def main(words: Sequence[str], paths: Paths) -> int:
    """``up RELEASE`` before its engine starts, ``down RELEASE`` after it ended."""
    if len(words) != 2 or words[0] not in ("up", "down"):
        raise HostToolError(
            "fence", f"{' '.join(words)!r} is no order", "up or down, and a release"
        )
    release = load(words[1], paths)
    if release.cluster is not None:
        _down(release, release.cluster)
        if words[0] == "up":
            _up(release, release.cluster)
    return 0


def _up(release: Release, cluster: Cluster) -> None:
    chain = _chain(release)
    for program, addresses in _programs(cluster):
        let_in = [("-i", "lo"), *(("-s", address) for address in addresses)]
        _must(program, "-N", chain)
        for rule in let_in:
            _must(program, "-A", chain, *rule, "-j", "RETURN")
        _must(program, "-A", chain, "-j", "DROP")
        _must(program, "-I", *_jump(cluster, chain))  # last: whole from its first packet


def _down(release: Release, cluster: Cluster) -> None:
    """Take away what a start has left, as far as it is there."""
    chain = _chain(release)
    for program, _ in _programs(cluster):
        for order in (("-D", *_jump(cluster, chain)), ("-F", chain), ("-X", chain)):
            finished([program, *_WAIT, *order], _LIMIT_S)


def _programs(cluster: Cluster) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "iptables", tuple(member.address for member in cluster.members)
    yield "ip6tables", ()


def _jump(cluster: Cluster, chain: str) -> tuple[str, ...]:
    ports = f"{cluster.port}:{cluster.proven_port}"
    return ("INPUT", "-p", "tcp", "--dport", ports, "-j", chain)


def _chain(release: Release) -> str:
    return f"SPARK-{release.name[-12:]}"


def _must(program: str, *order: str) -> None:
    done = finished([program, *_WAIT, *order], _LIMIT_S)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise HostToolError(
            "fence",
            f"the ports of the cluster stay open to all ({said[-1] if said else program})",
            "keep its network apart from others, or have a firewall let members alone in",
        )
