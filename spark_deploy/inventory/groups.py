"""Functions for inventory files: groups of hosts with settings, checked before any connection.

Inventory files import these functions with a leading underscore, to hide them from pyinfra.
"""

import dataclasses
import fnmatch
import functools
import getpass
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click
from paramiko import SSHException
from pydantic import Field
from pydantic.dataclasses import dataclass
from pyinfra.connectors.sshuserclient.client import get_ssh_config

from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.checkout import CHECKOUT, load_schema, read_mapping
from spark_deploy.config.documents import CLOSED, Text, convert
from spark_deploy.config.errors import Problem, SettingsError
from spark_deploy.config.schema_errors import schema_problems
from spark_deploy.config.settings.load import HostSettings, load_hosts
from spark_deploy.config.settings.patterns import Address, Login
from spark_deploy.hosts.payload import supported_engines
from spark_deploy.inventory.clusters import (
    cluster_problems,
    duplicate_address_problems,
    replica_problems,
    with_replica_addresses,
)
from spark_deploy.inventory.command_line import (
    check_patterns,
    command_line,
    login_user,
    parse_overrides,
    requires_valid_models,
)
from spark_deploy.inventory.connections import patch_pyinfra
from spark_deploy.inventory.host_keys import open_transport
from spark_deploy.inventory.host_names import (
    CONTEXT_KEY,
    HostContext,
    host_problems,
    stray_file_problems,
)
from spark_deploy.plan.gateway import gateway_plan
from spark_deploy.plan.resolve import plan_problems

T = TypeVar("T")
Group = tuple[list[tuple[str, dict[str, Any]]], dict[str, Any]]
HOSTS_FILE = "hosts.yml"
_PYINFRA_KEYS = {
    "ssh_hostname": "address", "ssh_user": "user", "ssh_port": "port", "ssh_key": "key_file",
}  # fmt: skip


@dataclass(frozen=True, slots=True, config=CLOSED)
class HostEntry:
    """How to reach a host; ~/.ssh/config supplies missing values."""

    address: Address | None = None
    """Address, if ssh does not know the name."""
    user: Login | None = None
    """Login user."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """SSH port."""
    key_file: Text | None = None
    """Private key on the controller."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class HostList:
    """hosts.yml: names of hosts, and how to reach each host; "@local" is this machine."""

    hosts: dict[str, HostEntry | None] = Field(min_length=1)
    """By name. Leave the value empty if ssh knows the name."""


def read_hosts(path: Path) -> HostList:
    """Read ``hosts.yml``. Raises SettingsError with every mistake."""
    data, problems = read_mapping(path, label=path.name)
    problems = problems or list(schema_problems(data, load_schema("hosts"), lambda _: path.name))
    if problems:
        raise SettingsError(problems)
    return convert(HostList, data)


def hosts_of(file: str, group: str = "spark") -> dict[str, Group]:
    """Return a group of the hosts in hosts.yml, for ``globals().update(_hosts_of(__file__))``."""
    hosts = read_hosts(vars_root(file) / HOSTS_FILE).hosts
    data: dict[str, dict[str, Any]] = {}
    for name, entry in hosts.items():
        fields = {key: getattr(entry, field, None) for key, field in _PYINFRA_KEYS.items()}
        data[name] = {key: value for key, value in fields.items() if value is not None}
    return {group: group_from(group, hosts=list(hosts), file=file, host_data=data)}


def group_from(
    name: str,
    *,
    hosts: Sequence[str],
    file: str,
    generated: Mapping[str, Any] | None = None,
    host_data: Mapping[str, Mapping[str, Any]] | None = None,
) -> Group:
    """Return a pyinfra group: ``spark = _group_from("spark", hosts=[...], file=__file__)``.

    ``name`` also names the group's file in ``group_vars``. The host ``@local`` is this machine.
    ``file`` is the inventory's ``__file__``. ``host_data`` is pyinfra's data by host.
    """
    return groups_from({name: hosts}, file=file, generated=generated, host_data=host_data)[name]


def groups_from(
    groups: Mapping[str, Sequence[str]],
    *,
    file: str,
    generated: Mapping[str, Any] | None = None,
    host_data: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Group]:
    _prefer_checkout()
    patch_pyinfra()
    arguments, stem = command_line(), Path(file).stem
    if problems := list(host_problems(groups, file=file)):
        raise SettingsError(problems)
    check_patterns(arguments, groups, stem)
    selected = select_hosts(arguments, groups, stem)
    if not selected:
        excluded = " ".join(f"--exclude {pattern}" for pattern in arguments.get("exclude") or ())
        raise SettingsError.single(excluded, "excludes every host", "exclude fewer hosts")
    needs_models = requires_valid_models(arguments)
    given_data = host_data or {}
    hosts = _load_settings(
        groups, file, parse_overrides(arguments), generated, given_data, needs_models=needs_models
    )
    root = vars_root(file)
    read_user_catalog = functools.partial(read_catalog, user_dir=root)
    catalog = _once_per_command(f"catalog of {root}", read_user_catalog)
    check_conflicts(hosts, catalog, must_serve=hosts if needs_models else ())
    if "operations" in arguments:  # the command is pyinfra itself
        signal.signal(signal.SIGINT, _exit_on_interrupt)
    user = login_user(arguments)
    data = {}
    for name, loaded in hosts.items():
        connection = _connection_data(loaded, given_data.get(name, {}), user)
        data[name] = {**connection, CONTEXT_KEY: HostContext(loaded, catalog)}
    if _is_bootstrap(arguments):
        # Only bootstrap needs an SSH client and passwords here, and their import is slow.
        from spark_deploy.inventory.bootstrap import prepare
        from spark_deploy.inventory.login import PasswordPrompt

        prompt = _once_per_command("password", PasswordPrompt)
        contacts = prepare({name: data[name] for name in selected}, prompt=prompt)
        for name, contact_data in contacts.items():
            data[name].update(contact_data)
    return {group: ([(name, data[name]) for name in names], {}) for group, names in groups.items()}


def _load_settings(
    groups: Mapping[str, Sequence[str]],
    file: str,
    overrides: Mapping[str, Any],
    generated: Mapping[str, Any] | None,
    given_data: Mapping[str, Mapping[str, Any]],
    *,
    needs_models: bool,
) -> dict[str, HostSettings]:
    """Return every host's settings, with addresses. Raises SettingsError with all mistakes."""
    root = vars_root(file)
    problems = list(stray_file_problems(groups, root=root, file=file))
    hosts: dict[str, HostSettings] = {}
    try:
        hosts = load_hosts(
            groups, root=root, overrides=overrides, generated=generated, must_serve=needs_models
        )
    except SettingsError as error:
        problems += error.problems
    endpoints = {}
    for name, loaded in hosts.items():
        data, ssh = given_data.get(name, {}), loaded.settings.ssh
        # This does not read ~/.ssh/config.
        ssh = dataclasses.replace(ssh, hostname=data.get("ssh_hostname", ssh.hostname))
        endpoints[name] = (ssh.hostname or name, data.get("ssh_port") or ssh.port or 22)
        settings = dataclasses.replace(loaded.settings, ssh=ssh)
        hosts[name] = dataclasses.replace(loaded, settings=settings)
    problems += duplicate_address_problems(endpoints)
    fix = f"set it to a host in this inventory: {', '.join(hosts)}"
    for canary in dict.fromkeys(loaded.settings.rollout.canary for loaded in hosts.values()):
        if canary is not None and canary not in hosts:
            message = f"'{canary}' is not a host in this inventory"
            problems.append(Problem("rollout.canary", message, fix))
    if problems:
        raise SettingsError(problems)
    return with_replica_addresses(hosts)


def _is_bootstrap(arguments: Mapping[str, Any]) -> bool:
    operations: Sequence[str] = arguments.get("operations") or []
    deploy_file = Path(operations[0] if operations else "")
    runs_bootstrap = deploy_file.parts[-2:] == ("deploys", "bootstrap.py")
    return runs_bootstrap or bool(arguments.get("bootstraps"))


def select_hosts(
    arguments: Mapping[str, Any], groups: Mapping[str, Sequence[str]], stem: str
) -> list[str]:
    """Return the hosts that --limit and --exclude select, in inventory order."""
    names = list(dict.fromkeys(host for hosts in groups.values() for host in hosts))

    def matching(option: str) -> set[str]:
        matches: set[str] = set()
        for pattern in arguments.get(option) or ():
            matches.update(names if pattern in ("all", stem) else groups.get(pattern, ()))
            matches.update(fnmatch.filter(names, pattern))
        return matches

    limited = matching("limit") if arguments.get("limit") else set(names)
    excluded = matching("exclude")
    return [name for name in names if name in limited and name not in excluded]


def _once_per_command(name: str, make: Callable[[], T]) -> T:
    """Return a value that all groups of a command share."""
    context = click.get_current_context(silent=True)
    if context is None:
        return make()
    key = f"{__name__}.{name}"
    if key not in context.meta:
        context.meta[key] = make()
    value: T = context.meta[key]
    return value


def vars_root(file: str) -> Path:
    """Return the folder of an inventory file's settings: its own folder or the parent."""
    folder = Path(file).resolve().parent
    for candidate in (folder, folder.parent):
        names = ("group_vars", "host_vars", "catalog", HOSTS_FILE)
        if any((candidate / name).exists() for name in names):
            return candidate
    return folder


def _connection_data(
    loaded: HostSettings, given_data: Mapping[str, Any], login_user: str | None
) -> dict[str, Any]:
    """Return pyinfra's data of a host: connection, sudo, and the settings for display.

    For root, sudo is not used, because it may be missing. ``login_user`` is from the command line.
    """
    if loaded.host.startswith("@"):
        return {**loaded.data, "_sudo": os.geteuid() != 0, **given_data}
    ssh = loaded.settings.ssh
    connection = {
        "ssh_hostname": ssh.hostname,
        "ssh_user": ssh.user,
        "ssh_port": ssh.port,
        "ssh_key": ssh.key_file,
        "ssh_known_hosts_file": ssh.known_hosts_file,
        # Only deploys/bootstrap.py records host keys, and shows the keys first.
        "ssh_strict_host_key_checking": "yes",
        "ssh_paramiko_connect_kwargs": {"transport_factory": open_transport},
    }
    connection = {key: value for key, value in connection.items() if value is not None}
    data = {**loaded.data, **connection, **given_data}
    user = login_user or data.get("ssh_user") or _configured_user(loaded.host, data)
    return {"_sudo": user != "root", **data}


def _configured_user(host: str, data: Mapping[str, Any]) -> str:
    """Return the user in ~/.ssh/config or the local user; "" if neither is known."""
    # Errors in the file are reported later, when pyinfra connects. A KeyError means that the
    # local user is unknown.
    with suppress(OSError, ValueError, KeyError, SSHException, RecursionError):
        config = get_ssh_config(data.get("ssh_config_file"))
        user = config.lookup(data.get("ssh_hostname", host)).get("user") if config else None
        return user or getpass.getuser()
    return ""


def check_conflicts(
    hosts: Mapping[str, HostSettings], catalog: Catalog, *, must_serve: Collection[str]
) -> None:
    """Raise SettingsError with all contradictions in the settings of hosts.

    Hosts in ``must_serve`` also need a profile that fits the model.
    """
    problems = [*cluster_problems(hosts), *replica_problems(hosts)]
    for name, loaded in hosts.items():
        if name in must_serve:
            problems += plan_problems(loaded.settings, catalog, supported_engines())
        gateway = gateway_plan(loaded.settings, name)
        if gateway.tls is not None:
            from spark_deploy.hosts.certificates import check_gateway_certificate  # slow to import

            problems += check_gateway_certificate(gateway)
    if problems:
        raise SettingsError(list(dict.fromkeys(problems)))


def _prefer_checkout() -> None:
    """Import ``roles`` from the checkout, not from an installed package of the same name."""
    path = str(CHECKOUT)
    if path in sys.path:
        sys.path.remove(path)
    sys.path.insert(0, path)


def _exit_on_interrupt(signum: int, frame: FrameType | None) -> None:
    # pyinfra would wait for all commands and exit 0.
    sys.stderr.write("\ninterrupted: jobs on the hosts continue; run again to follow them\n")
    sys.stderr.flush()
    os._exit(130)
