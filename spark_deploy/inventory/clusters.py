"""Clusters of an inventory: are their members there, and told the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spark_contract.documents import plain

from spark_deploy.errors import Problem
from spark_deploy.settings.load import HostSettings
from spark_deploy.settings.types import Settings

# What a release is made of: members that differ in it would be members of different clusters.
_ALIKE = (
    "model", "profile", "engine", "checkpoint", "cluster", "memory", "allow_containers",
    "services", "watch", "check", "images", "paths",
)  # fmt: skip
_ALIKE_OF_SERVE = ("names", "start_timeout_s", "stop_timeout_s", "drain_s")


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


def _differences(head: HostSettings, member: HostSettings) -> Iterator[Problem]:
    ours, theirs = _told(member.settings), _told(head.settings)
    for key in (key for key in ours if ours[key] != theirs[key]):
        what = f"differs from that of {head.host}, the head of their cluster"
        fix = "write it once, into group_vars of their group"
        yield Problem(f"{member.host}: {key}", what, fix)


def _told(settings: Settings) -> dict[str, Any]:
    serve = {f"serve.{name}": getattr(settings.serve, name) for name in _ALIKE_OF_SERVE}
    return {name: plain(getattr(settings, name)) for name in _ALIKE} | serve
