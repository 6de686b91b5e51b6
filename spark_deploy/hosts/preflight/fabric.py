"""Is the network of a cluster what its ports promise, and are its members alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from spark_contract.fabric import SpeedFound

from spark_deploy.config.errors import Problem
from spark_deploy.hosts.facts.survey import Survey
from spark_deploy.hosts.preflight.verdict import Verdict
from spark_deploy.plan.machine import Way

_FULL_MBIT_PER_S = 200_000  # of one cable, told by each of the two interfaces of its cage
_LARGE_MTU = 9000


def judge_ways(host: str, ways: Sequence[Way], reached: Mapping[str, str]) -> Verdict:
    """Collect what is wrong with the ways from a host to the others of its cluster."""
    problems, warnings = [], []
    for way in ways:
        where = f"{host}: {way.interface}"
        answer = reached.get(way.address, "unknown")
        if answer == "no":
            problems.append(_cut(where, way))
        if answer == "unknown":
            what = f"the way to {way.host} ({way.address}) was not tried: there is no ping here"
            warnings.append(Problem(where, what, "apt-get install iputils-ping"))
        if way.mtu != way.other_mtu:
            what = f"MTU {way.mtu}, but {way.other_mtu} on {way.host}"
            problems.append(Problem(where, what, "set the same MTU at both ends (netplan)"))
    return Verdict(tuple(problems), (*warnings, *_slow(host, ways)))


def _cut(where: str, way: Way) -> Problem:
    return Problem(
        where,
        f"no packet of {way.mtu} bytes comes back from {way.host} ({way.address})",
        "see to cable, address and MTU of both ends, and that no firewall is between members",
    )


def _slow(host: str, ways: Sequence[Way]) -> Iterator[Problem]:
    """Yield what costs speed and nothing else."""
    with_rdma = {way.interface: way for way in ways if way.device}
    for way in with_rdma.values():
        where = f"{host}: {way.interface}"
        if way.speed_mbit_per_s is not None and way.speed_mbit_per_s < _FULL_MBIT_PER_S:
            what = f"linked at {way.speed_mbit_per_s // 1000} Gb/s of 200"
            fix = "use a cable for 200 Gb/s; behind a switch set the speed of its port"
            yield Problem(where, what, fix)
        if way.mtu < _LARGE_MTU:
            what = f"MTU {way.mtu}: RDMA moves small packets, reported to cost much of prefill"
            yield Problem(where, what, f"set MTU {_LARGE_MTU} at both ends (netplan)")
    if len(with_rdma) == 1:
        what = "one of the two interfaces of the cage has an address: half of the cable's speed"
        fix = "give its twin one in a network of its own (netplan)"
        yield Problem(f"{host}: {next(iter(with_rdma))}", what, fix)


# Below this share of what a link says something is wrong with it. What TCP and python can show at
# most is not known of a Spark: so above the second figure a way is never called slow.
_LEAST_SHARE = 0.25
_LEAST_GBIT_PER_S = 10.0
_DOUBTFUL_GBIT_PER_S = 25.0  # of 200: a ConnectX-7 that came up degraded is reported to carry 13


def told_of(way: Way, found: SpeedFound) -> str:
    """Return what was measured of a way, beside what its link says."""
    link = f"{way.speed_mbit_per_s / 1000:g} Gb/s" if way.speed_mbit_per_s else "of unknown speed"
    return (
        f"{way.interface} to {way.host} ({way.address}): {_gbit_per_s(found):.1f} Gb/s over TCP "
        f"({found.arrived_bytes / 1e6:.0f} MB in {found.took_s:.2f} s; link {link})"
    )


def judge_speed(host: str, way: Way, found: SpeedFound) -> Verdict:
    """Collect what a short test over TCP can say against a way; how fast RDMA is it cannot."""
    where, carried = f"{host}: {way.interface}", _gbit_per_s(found)
    stated = (way.speed_mbit_per_s or 0) / 1000
    if not found.arrived_bytes:
        what = f"the connection opens, but nothing of full size gets to {way.host}"
        fix = f"set MTU {way.mtu} at both ends, and at the switch between them"
        return Verdict((Problem(where, what, fix),), ())
    if carried < min(_LEAST_SHARE * stated, _LEAST_GBIT_PER_S):
        what = f"{carried:.1f} Gb/s to {way.host} over a link that says {stated:g}"
        fix = "try another cable, see `ethtool -S` for errors and `ip route get` for the way taken"
        return Verdict((Problem(where, what, fix),), ())
    if carried < _DOUBTFUL_GBIT_PER_S and stated * 1000 >= _FULL_MBIT_PER_S:
        what = f"{carried:.1f} Gb/s to {way.host}: a port that came up degraded is reported to"
        what += " carry 13 and still to say 200"
        fix = "measure RDMA with ib_write_bw; about 92 are usual for each of the two interfaces"
        return Verdict((), (Problem(where, what, fix),))
    return Verdict((), ())


def _gbit_per_s(found: SpeedFound) -> float:
    return found.arrived_bytes * 8 / 1e9 / max(found.took_s, 1e-6)


def unlike(members: Sequence[str], surveys: Mapping[str, Survey]) -> Iterator[Problem]:
    """Yield what members of a cluster must not differ in, and kernels that no cluster runs on."""
    seen = {name: surveys[name] for name in members if name in surveys}
    branches = {name: one.gpu.driver_version.partition(".")[0] for name, one in seen.items()}
    if len(set(branches.values())) > 1:
        named = ", ".join(f"{name} {branch or 'none'}" for name, branch in branches.items())
        fix = "bring all members to one branch, by the vendor's means"
        yield Problem("driver", f"of different branches: {named}", fix)
    for name, one in seen.items():
        if one.memory.cma_free_bytes > one.memory.cma_total_bytes:
            yield Problem(
                f"{name}: kernel",
                f"{one.identity.kernel} keeps memory for its handover (CmaFree is above CmaTotal); "
                "NCCL is reported to find none to start with",
                "boot with kho=off, or with a 6.17 kernel",
            )


def same_host_key(surveys: Mapping[str, Survey]) -> dict[str, Problem]:
    """Return a warning for each host that shows the SSH host key of another one.

    Hosts cloned from one disk do: whoever holds the key of one can pass for all of them.
    """
    by_key: dict[str, list[str]] = {}
    for name, survey in surveys.items():
        if survey.identity.host_key:
            by_key.setdefault(survey.identity.host_key, []).append(name)
    return {
        name: Problem(
            "SSH host key",
            f"is also that of {', '.join(other for other in names if other != name)}",
            "list it once, if it is one machine; else give each its own: "
            "`rm /etc/ssh/ssh_host_*; ssh-keygen -A; systemctl restart ssh` on it, then "
            "`ssh-keygen -R` its name here and run deploys/bootstrap.py",
        )
        for names in by_key.values()
        for name in names
        if len(names) > 1
    }
