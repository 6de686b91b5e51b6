"""``hosts.yml``: the hosts of an inventory as a list for people, read by an inventory file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from spark_deploy.config.documents import CLOSED, Text, convert
from spark_deploy.config.errors import Problem, SettingsError
from spark_deploy.config.schema_errors import problems_of
from spark_deploy.config.settings.patterns import Address, Login
from spark_deploy.config.yaml_files import load_schema, read_mapping
from spark_deploy.inventory.groups import Group, group_from, vars_root

HOSTS_FILE = "hosts.yml"


@dataclass(frozen=True, slots=True, config=CLOSED)
class HostEntry:
    """How to reach one host; what is left out is left to ~/.ssh/config."""

    address: Address | None = None
    """Address, where the name is none that ssh knows."""
    user: Login | None = None
    """Login user."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """SSH port."""
    key_file: Text | None = None
    """Private key on the controller."""

    def data(self) -> dict[str, Any]:
        """Return it as pyinfra's data of a host."""
        found = {
            "ssh_hostname": self.address,
            "ssh_user": self.user,
            "ssh_port": self.port,
            "ssh_key": self.key_file,
        }
        return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True, config=CLOSED)
class HostList:
    """hosts.yml: names of hosts, and how to reach each; "@local" is the machine this runs on."""

    hosts: dict[str, HostEntry | None] = Field(min_length=1)
    """By name. A name that ssh knows needs nothing behind its colon."""


def read_hosts(path: Path) -> HostList:
    """Return the list of hosts.

    Raises:
        SettingsError: it is not there, or says something wrong; with every mistake.
    """
    data, problems = read_mapping(path, shown=path.name)
    found = problems_of(data, load_schema("hosts"), lambda key: path.name)
    if problems := problems or list(found):
        raise SettingsError(problems)
    listed = convert(HostList, data)
    if problems := list(_twice(listed, path.name)):
        raise SettingsError(problems)
    return listed


def _twice(listed: HostList, shown: str) -> Iterator[Problem]:
    """Yield hosts of two names: two deploys at once would change the same machine."""
    known: dict[tuple[str, int], str] = {}
    for name, entry in listed.hosts.items():
        if entry is None or entry.address is None:
            continue
        first = known.setdefault((entry.address, entry.port or 22), name)
        if first != name:
            what = f"is at the same address as {first}, {entry.address}"
            yield Problem(f"{shown}: hosts.{name}", what, "leave one of them, or mend its address")


def hosts_of(file: str, group: str = "spark") -> dict[str, Group]:
    """Return the group of ``hosts.yml``, for ``globals().update(...)`` of an inventory file.

    Args:
        file: the inventory's ``__file__``; ``hosts.yml`` lies where its ``group_vars`` do.
        group: its choices may stand in ``group_vars/<group>.yml`` as well as in ``all.yml``.
    """
    found = read_hosts(vars_root(file) / HOSTS_FILE).hosts
    data = {name: entry.data() for name, entry in found.items() if entry}
    return {group: group_from(group, hosts=list(found), file=file, host_data=data)}
