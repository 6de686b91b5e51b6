"""What inventory files call: hosts with their settings, checked before any connection.

Names in an inventory file that pyinfra must not take for groups begin with an underscore.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click

from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import Problem, SettingsError
from spark_deploy.config.settings.load import HostSettings, load_hosts
from spark_deploy.hosts.payload import supported_engines
from spark_deploy.inventory.clusters import (
    cluster_problems,
    knowing_addresses,
    replica_problems,
    twin_problems,
)
from spark_deploy.inventory.command_line import check_patterns, command_line, judges, overrides
from spark_deploy.inventory.host_keys import transport
from spark_deploy.inventory.host_names import KEY, Known, host_problems, stray_files
from spark_deploy.inventory.output_limits import listen_carefully
from spark_deploy.plan.gateway import gateway_plan
from spark_deploy.plan.resolve import problems_of

T = TypeVar("T")
Group = tuple[list[tuple[str, dict[str, Any]]], dict[str, Any]]


def group_from(
    name: str,
    *,
    hosts: Sequence[str],
    file: str,
    generated: Mapping[str, Any] | None = None,
    host_data: Mapping[str, Mapping[str, Any]] | None = None,
) -> Group:
    """Return one pyinfra group: ``spark = _group_from("spark", hosts=[...], file=__file__)``.

    Args:
        name: the group; its choices are in ``group_vars/<name>.yml``.
        hosts: names; ``@local`` stands for this machine.
        file: the inventory's ``__file__``; ``group_vars`` lies beside it or one folder up.
        generated: settings the inventory works out itself, below host_vars in rank.
        host_data: further pyinfra data of single hosts, such as ``ssh_hostname``.
    """
    return groups_from({name: hosts}, file=file, generated=generated, host_data=host_data)[name]


def groups_from(
    groups: Mapping[str, Sequence[str]],
    *,
    file: str,
    generated: Mapping[str, Any] | None = None,
    host_data: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Group]:
    """Return several pyinfra groups; in the file: ``globals().update(_groups_from(...))``."""
    _make_importable()
    listen_carefully()
    arguments = command_line()
    if wrong := list(host_problems(groups, file=file)):
        raise SettingsError(wrong)
    check_patterns(arguments, groups, Path(file).stem)
    if not chosen_hosts(arguments, groups, Path(file).stem):
        excluded = " ".join(f"--exclude {one}" for one in arguments.get("exclude") or ())
        raise SettingsError.one(excluded, "leaves no host", "exclude fewer of them")
    judged = judges(arguments)
    found = _loaded(groups, file, overrides(arguments), generated, judged=judged)
    extra = host_data or {}
    found = {name: _with_address(one, extra.get(name, {})) for name, one in found.items()}
    if wrong := list(twin_problems(_endpoints(found, extra))):
        raise SettingsError(wrong)
    found = knowing_addresses(found)
    _check_canaries(found)
    root = vars_root(file)
    catalog = _of_this_run(f"catalog of {root}", functools.partial(read_catalog, own=root))
    refuse_together(found, catalog, judged=found if judged else ())
    if "operations" in arguments:  # in pyinfra itself: our own commands end in their own ways
        signal.signal(signal.SIGINT, _stop)
    data = {
        host: {**_data(one), **extra.get(host, {}), KEY: Known(one, catalog)}
        for host, one in found.items()
    }
    if _is_bootstrap(arguments):
        chosen = chosen_hosts(arguments, groups, Path(file).stem)
        for host, further in _first_contact({host: data[host] for host in chosen}, arguments):
            data[host].update(further)
    return {group: ([(host, data[host]) for host in hosts], {}) for group, hosts in groups.items()}


def _endpoints(
    found: Mapping[str, HostSettings], extra: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[str, int]]:
    """Return where each host is reached; what stands in ~/.ssh/config is not followed."""
    return {
        name: (
            one.settings.ssh.hostname or name,
            extra.get(name, {}).get("ssh_port") or one.settings.ssh.port or 22,
        )
        for name, one in found.items()
    }


def _loaded(
    groups: Mapping[str, Sequence[str]],
    file: str,
    chosen: Mapping[str, Any],
    generated: Mapping[str, Any] | None,
    *,
    judged: bool,
) -> dict[str, HostSettings]:
    """Return the settings of all hosts; files that nobody reads are told with their mistakes."""
    root = vars_root(file)
    problems = list(stray_files(groups, root=root, file=file))
    found: dict[str, HostSettings] = {}
    try:
        found = load_hosts(groups, root=root, overrides=chosen, generated=generated, judged=judged)
    except SettingsError as error:
        problems += error.problems
    if problems:
        raise SettingsError(problems)
    return found


def _is_bootstrap(arguments: Mapping[str, Any]) -> bool:
    operations: Sequence[str] = arguments.get("operations") or []
    named = any(Path(name).parts[-2:] == ("deploys", "bootstrap.py") for name in operations[:1])
    return named or bool(arguments.get("bootstraps"))


def chosen_hosts(
    arguments: Mapping[str, Any], groups: Mapping[str, Sequence[str]], stem: str
) -> list[str]:
    """List the hosts that --limit and --exclude leave, as pyinfra will."""
    names = list(dict.fromkeys(host for hosts in groups.values() for host in hosts))

    def matching(option: str) -> set[str]:
        found: set[str] = set()
        for pattern in arguments.get(option) or ():
            found.update(names if pattern in ("all", stem) else groups.get(pattern, ()))
            found.update(fnmatch.filter(names, pattern))
        return found

    limited = matching("limit") if arguments.get("limit") else set(names)
    excluded = matching("exclude")
    return [name for name in names if name in limited and name not in excluded]


def _first_contact(
    data: Mapping[str, Mapping[str, Any]], arguments: Mapping[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """Let bootstrap look at the hosts; everything else never logs in with a password."""
    # Only this run needs an SSH client this early.
    from spark_deploy.inventory.bootstrap import prepare
    from spark_deploy.inventory.login import Asked

    asked = _of_this_run("password", Asked)
    return list(prepare(data, asked=asked).items())


def _of_this_run(what: str, make: Callable[[], T]) -> T:
    """Return what the groups of one inventory share: made for the first, kept with the command."""
    context = click.get_current_context(silent=True)
    if context is None:
        return make()
    key = f"{__name__}.{what}"
    if key not in context.meta:
        context.meta[key] = make()
    found: T = context.meta[key]
    return found


_BESIDE = ("group_vars", "host_vars", "catalog", "hosts.yml")


def vars_root(file: str) -> Path:
    """Return the folder whose group_vars and catalog are an inventory file's: its own, or above."""
    folder = Path(file).resolve().parent
    for candidate in (folder, folder.parent):
        if any((candidate / name).exists() for name in _BESIDE):
            return candidate
    return folder


def _with_address(found: HostSettings, data: Mapping[str, Any]) -> HostSettings:
    """Let plans know the address that an inventory file gives pyinfra."""
    if "ssh_hostname" not in data:
        return found
    ssh = dataclasses.replace(found.settings.ssh, hostname=data["ssh_hostname"])
    return dataclasses.replace(found, settings=dataclasses.replace(found.settings, ssh=ssh))


def _data(found: HostSettings) -> dict[str, Any]:
    """Return pyinfra's data of a host: how to connect, sudo, and the settings for reading."""
    settings, ssh = found.settings, found.settings.ssh
    # `_sudo` is a string-typed trap in pyinfra ("no" is true): ours is a checked boolean.
    data = {**found.data, "_sudo": settings.sudo}
    if found.host.startswith("@"):
        # Who is root here already needs no sudo, and there may be none.
        is_root = found.host == "@local" and os.geteuid() == 0
        return {**data, "_sudo": settings.sudo and not is_root}
    connection = {
        "ssh_hostname": ssh.hostname,
        "ssh_user": ssh.user,
        "ssh_port": ssh.port,
        "ssh_key": ssh.key_file,
        "ssh_config_file": ssh.config_file,
        "ssh_known_hosts_file": ssh.known_hosts_file,
        # Keys of hosts are shown and recorded by deploys/bootstrap.py, never accepted silently.
        "ssh_strict_host_key_checking": "yes",
        "ssh_paramiko_connect_kwargs": {"transport_factory": transport},
    }
    return {**data, **{key: value for key, value in connection.items() if value is not None}}


def _check_canaries(found: Mapping[str, HostSettings]) -> None:
    """Refuse a canary that no host is: all would change as if there were none."""
    wanted = dict.fromkeys(one.settings.rollout.canary for one in found.values())
    fix = f"name one of these hosts: {', '.join(found)}"
    problems = [
        Problem("rollout.canary", f"'{name}' is no host of this inventory", fix)
        for name in wanted
        if name is not None and name not in found
    ]
    if problems:
        raise SettingsError(problems)


def refuse_together(
    found: Mapping[str, HostSettings], catalog: Catalog, *, judged: Collection[str]
) -> None:
    """Refuse settings that cannot work together, for all hosts at once.

    Of those in ``judged`` it is refused as well what cannot be served.
    """
    problems = [*cluster_problems(found), *replica_problems(found)]
    for host in found.values():
        if host.host in judged:
            problems += problems_of(host.settings, catalog, supported_engines())
        gateway = gateway_plan(host.settings, host.host)
        if gateway.tls is not None:
            # Only this needs X.509.
            from spark_deploy.hosts.certificates import check_gateway

            problems += check_gateway(gateway)
    if problems:
        raise SettingsError(list(dict.fromkeys(problems)))


def _make_importable() -> None:
    """Let ``roles`` be found from any working directory, before an installed namesake."""
    path = str(CHECKOUT)
    if path in sys.path:
        sys.path.remove(path)
    sys.path.insert(0, path)


def _stop(signum: int, frame: FrameType | None) -> None:
    # pyinfra would wait for the commands of all hosts and then exit 0. Jobs on hosts belong to
    # their systemd and go on.
    sys.stderr.write("\ninterrupted: jobs on the hosts go on; run again to look at them\n")
    sys.stderr.flush()
    os._exit(130)
