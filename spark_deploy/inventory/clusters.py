"""Clusters and replicas of an inventory: are the hosts there, and told the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spark_contract.documents import plain

from spark_deploy.config.errors import Problem
from spark_deploy.config.settings.load import HostSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.gateway import address_of

# What a release is made of: members that differ in it would be members of different clusters.
_ALIKE = (
    "model", "profile", "engine", "checkpoint", "cluster", "memory", "allow_containers",
    "services", "watch", "check", "images", "paths", "lock_file",
)  # fmt: skip
_ALIKE_OF_SERVE = ("names", "start_timeout_s", "stop_timeout_s", "drain_s")
# What clients of one address must find the same, whoever answers.
_ALIKE_REPLICAS = ("model", "replicas")
_ALIKE_OF_REPLICAS = ("names", "port", "api_key", "max_body_bytes")


def cluster_problems(hosts: Mapping[str, HostSettings]) -> Iterator[Problem]:
    """Yield why hosts that shall serve together cannot, from their settings alone."""
    for name, found in hosts.items():
        members = found.settings.cluster.hosts
        if not members:
            continue
        for other in members:
            if other not in hosts:
                fix = "list it beside the others, in one group of the inventory"
                yield Problem(f"{name}: cluster.hosts", f"'{other}' is no host of its group", fix)
        if name != members[0] and members[0] in hosts:
            yield from _differences(hosts[members[0]], found)
        told = {one: found.settings.cluster.hosts for one, found in hosts.items()}
        yield from _untold(name, members, told, "cluster")


def _untold(
    name: str, members: Sequence[str], told: Mapping[str, Sequence[str]], key: str
) -> Iterator[Problem]:
    """Yield hosts that the first one counts on and that know nothing of it."""
    for other in members[1:] if name == members[0] else ():
        if other in told and list(told[other][:1]) != [name]:
            what = f"{name} counts on it, but it is told {', '.join(told[other]) or 'none'}"
            fix = "write it once, into group_vars of their group"
            yield Problem(f"{other}: {key}.hosts", what, fix)


def twin_problems(endpoints: Mapping[str, tuple[str, int]]) -> Iterator[Problem]:
    """Yield hosts that are reached where another one is: two plans would change one machine."""
    first: dict[tuple[str, int], str] = {}
    for name, (address, port) in endpoints.items():
        if (other := first.setdefault((address, port), name)) != name:
            where = address if port == 22 else f"{address}, port {port}"
            what = f"is reached at {where}, as {other} is"
            yield Problem(name, what, "list each machine once; correct the address of one of them")


def replica_problems(hosts: Mapping[str, HostSettings]) -> Iterator[Problem]:
    """Yield why hosts cannot serve side by side behind one address."""
    for name, found in hosts.items():
        replicas = found.settings.replicas
        for other in replicas.hosts:
            if other not in hosts:
                fix = "list it beside the others, in one group of the inventory"
                yield Problem(f"{name}: replicas.hosts", f"'{other}' is no host of its group", fix)
            elif other not in replicas.addresses:
                what = f"nobody said how {other} is reached"
                yield Problem(f"{name}: replicas.addresses", what, f"say it: {{{other}: ADDRESS}}")
        first = hosts.get(replicas.hosts[0]) if replicas.hosts else None
        if first is not None and name != first.host:
            yield from _differences(first, found, _ALIKE_REPLICAS, _ALIKE_OF_REPLICAS, "the first")
        if replicas.hosts:
            told = {one: found.settings.replicas.hosts for one, found in hosts.items()}
            yield from _untold(name, replicas.hosts, told, "replicas")


def knowing_addresses(hosts: Mapping[str, HostSettings]) -> dict[str, HostSettings]:
    """Return hosts whose replicas know how each is reached, where anybody said so."""
    known = {name: address_of(one.settings, name) for name, one in hosts.items()}
    return {name: _knowing(one, known) for name, one in hosts.items()}


def _knowing(found: HostSettings, known: Mapping[str, str | None]) -> HostSettings:
    replicas = found.settings.replicas
    said = {name: address for name in replicas.hosts if (address := known.get(name))}
    told = replace(replicas, addresses={**said, **replicas.addresses})
    return replace(found, settings=replace(found.settings, replicas=told))


def _differences(
    head: HostSettings,
    member: HostSettings,
    alike: Sequence[str] = _ALIKE,
    of_serve: Sequence[str] = _ALIKE_OF_SERVE,
    called: str = "the head of their cluster",
) -> Iterator[Problem]:
    ours, theirs = (_told(one.settings, alike, of_serve) for one in (member, head))
    for key in (key for key in ours if ours[key] != theirs[key]):
        what = f"differs from that of {head.host}, {called}"
        fix = "write it once, into group_vars of their group"
        yield Problem(f"{member.host}: {key}", what, fix)


def _told(settings: Settings, alike: Sequence[str], of_serve: Sequence[str]) -> dict[str, Any]:
    serve = {f"serve.{name}": plain(getattr(settings.serve, name)) for name in of_serve}
    return {name: plain(getattr(settings, name)) for name in alike} | serve
