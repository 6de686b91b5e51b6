"""Finds this host's rank and the joined members of a cluster, and firewalls the ports.

Members stay connected to the head's port, so the kernel's socket tables list joined members.
"""

import ipaddress
import re
import socket
from collections.abc import Sequence

from spark_contract.paths import Paths
from spark_contract.release import Cluster, Member, Release
from spark_contract.tool import HostToolError

from spark_host.system.host import load_release
from spark_host.system.programs import error_line, run_program

_ESTABLISHED = "01"
_LOCAL = re.compile(r"\|-- ([0-9.]+)\n\s+/32 host LOCAL")
_IPTABLES_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 3.0
_WAIT = ("-w", "5")  # seconds to wait for other programs that change rules


def rank(release: Release, paths: Paths) -> int:
    """Return this host's rank in the cluster, or 0 without a cluster."""
    if release.cluster is None:
        return 0
    addresses = set(_LOCAL.findall(paths.below("/proc/net/fib_trie").read_text()))
    members = release.cluster.members
    ranks = [number for number, member in enumerate(members) if member.address in addresses]
    if len(ranks) != 1:
        named = ", ".join(f"{member.host} {member.address}" for member in members)
        message = (
            f"this host must have exactly one of the members' addresses ({named}), "
            f"but has {len(ranks)}"
        )
        fix = "restore the host's address on the fabric, or deploy all members again"
        raise HostToolError(f"cluster of {release.name}", message, fix)
    return ranks[0]


def local_member(release: Release, paths: Paths) -> Member | None:
    return release.cluster.members[rank(release, paths)] if release.cluster else None


def is_worker(release: Release, paths: Paths) -> bool:
    return rank(release, paths) > 0


def missing_members(release: Release, paths: Paths) -> list[Member]:
    """Return members that have not joined; a worker can check only the head."""
    cluster = release.cluster
    if cluster is None:
        return []
    others = cluster.members[1:] if rank(release, paths) == 0 else cluster.members[:1]
    joined = _connected_addresses(cluster.port, paths)
    return [member for member in others if member.address not in joined]


def describe_missing(release: Release, paths: Paths) -> str:
    return ", ".join(member.host for member in missing_members(release, paths))


def _connected_addresses(port: int, paths: Paths) -> set[str]:
    """Return the remote addresses of connections with ``port`` on either side."""
    addresses = set()
    for name in ("tcp", "tcp6"):
        table = paths.below(f"/proc/net/{name}")
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for _, local, remote, state, *_ in (line.split(maxsplit=4) for line in lines):
            ports = {int(address.rpartition(":")[2], 16) for address in (local, remote)}
            if state == _ESTABLISHED and port in ports:
                digits = remote.rpartition(":")[0][-8:]  # the IPv4 address; tcp6 has a prefix
                number = int.from_bytes(bytes.fromhex(digits), "little")
                addresses.add(str(ipaddress.IPv4Address(number)))
    return addresses


def responds(member: Member, cluster: Cluster, *, refusal_counts: bool) -> bool:
    try:
        socket.create_connection((member.address, cluster.serving_port), _CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return refusal_counts
    except OSError:
        return False
    return True


def fence(args: Sequence[str], paths: Paths) -> int:
    """Install (``up RELEASE``) or remove (``down RELEASE``) a firewall for a cluster's ports.

    Without the firewall, all hosts could reach the engine's store, which listens on all addresses.
    The unit of the engine ignores a failure of this command.
    """
    if len(args) != 2 or args[0] not in ("up", "down"):
        fix = "run `spark-host fence up RELEASE` or `fence down RELEASE`"
        raise HostToolError("fence", f"invalid arguments {list(args)}", fix)
    release = load_release(args[1], paths)
    cluster = release.cluster
    if cluster is None:
        return 0
    chain = f"SPARK-{release.name[-12:]}"
    jump = ("INPUT", "-p", "tcp", "--dport", f"{cluster.port}:{cluster.serving_port}", "-j", chain)
    for program in ("iptables", "ip6tables"):
        # Remove the rules of an earlier start.
        for command in (("-D", *jump), ("-F", chain), ("-X", chain)):
            run_program([program, *_WAIT, *command], _IPTABLES_TIMEOUT_S)
        if args[0] == "down":
            continue
        # No member uses IPv6.
        members = cluster.members if program == "iptables" else ()
        sources = [("-i", "lo"), *(("-s", member.address) for member in members)]
        rules = [("-A", chain, *source, "-j", "RETURN") for source in sources]
        # The jump is last, so that packets reach only a complete chain.
        for rule in (("-N", chain), *rules, ("-A", chain, "-j", "DROP"), ("-I", *jump)):
            result = run_program([program, *_WAIT, *rule], _IPTABLES_TIMEOUT_S)
            if result.returncode != 0:
                message = f"all hosts can still reach the cluster's ports ({error_line(result)})"
                fix = "isolate the network, or use a firewall that admits only members"
                raise HostToolError("fence", message, fix)
    return 0
