"""Check that hosts of clusters and replicas are in the inventory and have matching settings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spark_contract.documents import to_plain

from spark_deploy.config.errors import Problem
from spark_deploy.config.settings.load import HostSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.gateway import client_address

# All members of a cluster run one release, so these settings must be equal.
_SAME_IN_CLUSTER = (
    "model", "profile", "engine", "checkpoint", "cluster", "memory", "allow_containers",
    "services", "watch", "check", "images", "paths", "lock_file",
    "serve.names", "serve.defaults", "serve.start_timeout_s", "serve.drain_s",
)  # fmt: skip
# Clients of replicas depend on these settings, so they must be equal.
_SAME_IN_REPLICAS = (
    "model", "replicas", "serve.names", "serve.port", "serve.api_key", "serve.keys",
    "serve.max_body_bytes",
)  # fmt: skip
_LIST_IN_GROUP = "list the host in the same group of the inventory"
_IN_GROUP_VARS = "set the value once, in the group's group_vars"


def unknown_host_problems(hosts: Mapping[str, HostSettings]) -> Iterator[Problem]:
    """Report names in cluster.hosts and replicas.hosts that are not in the inventory."""
    for section in ("cluster", "replicas"):
        sections = [loaded.data.get(section) or {} for loaded in hosts.values()]
        names = dict.fromkeys(name for data in sections for name in data.get("hosts") or ())
        if unknown := [name for name in names if name not in hosts]:
            message = f"not in the inventory: {', '.join(unknown)}"
            yield Problem(f"{section}.hosts", message, f"choose from: {', '.join(hosts)}")


def cluster_problems(hosts: Mapping[str, HostSettings]) -> Iterator[Problem]:
    yield from _member_problems(hosts, "cluster", _SAME_IN_CLUSTER)


def replica_problems(hosts: Mapping[str, HostSettings]) -> Iterator[Problem]:
    yield from _member_problems(hosts, "replicas", _SAME_IN_REPLICAS)
    for name, loaded in hosts.items():
        replicas = loaded.settings.replicas
        for other in replicas.hosts:
            if other in hosts and other not in replicas.addresses:
                fix = f"set serve.address of {other}"
                yield Problem(f"{name}: replicas.hosts", f"the address of {other} is unknown", fix)


def _member_problems(
    hosts: Mapping[str, HostSettings], section: str, same_settings: Sequence[str]
) -> Iterator[Problem]:
    """Report unknown members, different settings and different lists of members."""
    members_by_host = {name: getattr(host.settings, section).hosts for name, host in hosts.items()}
    for name, members in members_by_host.items():
        for other in members:
            if other not in hosts:
                message = f"'{other}' is not in the same group"
                yield Problem(f"{name}: {section}.hosts", message, _LIST_IN_GROUP)
        if not members:
            continue
        yield from _setting_differences(hosts.get(members[0]), hosts[name], same_settings)
        if name != members[0]:
            continue
        for other in members[1:]:
            if other in hosts and name not in members_by_host[other][:1]:
                listed = ", ".join(members_by_host[other]) or "empty"
                message = f"is {listed}, but {name}'s list contains this host"
                yield Problem(f"{other}: {section}.hosts", message, _IN_GROUP_VARS)


def _setting_differences(
    first: HostSettings | None, member: HostSettings, keys: Sequence[str]
) -> Iterator[Problem]:
    """Report settings of a member that differ from those of the first host."""
    if first is None or first.host == member.host:
        return
    for key in keys:
        if _setting_value(member.settings, key) != _setting_value(first.settings, key):
            message = f"differs from the value of {first.host}, the first host"
            yield Problem(f"{member.host}: {key}", message, _IN_GROUP_VARS)


def _setting_value(settings: Settings, key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return to_plain(value)


def duplicate_address_problems(endpoints: Mapping[str, tuple[str, int]]) -> Iterator[Problem]:
    """Report hosts with the same address, because two plans would change the same machine."""
    name_by_endpoint: dict[tuple[str, int], str] = {}
    for name, (address, port) in endpoints.items():
        if (other := name_by_endpoint.setdefault((address, port), name)) != name:
            where = address if port == 22 else f"{address}, port {port}"
            message = f"has the same address as {other}: {where}"
            yield Problem(name, message, "list each machine once, or correct the address")


def with_replica_addresses(hosts: Mapping[str, HostSettings]) -> dict[str, HostSettings]:
    """Return the settings with the addresses at which replicas reach each other."""
    known_addresses: dict[str, str | None] = {}
    for name, loaded in hosts.items():
        settings = loaded.settings
        fleet_address = settings.fleet.address if settings.serve.expose == "lan" else None
        known_addresses[name] = fleet_address or client_address(settings, name)
    result = {}
    for name, loaded in hosts.items():
        replicas = loaded.settings.replicas
        addresses = {
            host: address for host in replicas.hosts if (address := known_addresses.get(host))
        }
        settings = replace(loaded.settings, replicas=replace(replicas, addresses=addresses))
        result[name] = replace(loaded, settings=settings)
    return result
