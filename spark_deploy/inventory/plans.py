"""The plan of a host for a deploy."""

from __future__ import annotations

import runpy
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from pyinfra import logger
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.context import inventory

from spark_deploy.config.errors import PlanError, SettingsError
from spark_deploy.hosts.network import Fabric
from spark_deploy.hosts.payload import SITE_REQUIREMENTS, quantiser_digest, read_payload
from spark_deploy.inventory.command_line import named_inventory, no_inventory
from spark_deploy.inventory.groups import Group, chosen_hosts, groups_from
from spark_deploy.inventory.host_names import KEY, held_for, host_problems, known_of
from spark_deploy.lock.resolve import locked_for
from spark_deploy.plan.cluster import Wave, waves_of
from spark_deploy.plan.resolve import Request
from spark_deploy.plan.types import HostPlan, PayloadIdentity, Ports

# Hosts run at the same time; the first one asks the hub, the others wait for its answer.
_locking = threading.Lock()


def payload_identity() -> PayloadIdentity:
    """Return what this checkout would send to hosts, by content."""
    payload = read_payload()
    return PayloadIdentity(
        tools_digest=payload.tools_digest,
        image_context_digest=payload.image_context_digest,
        python_requirements=SITE_REQUIREMENTS,
        quantiser_digest=quantiser_digest(),
    )


def waves_for(state: State) -> tuple[Wave, ...]:
    """Return in which waves the hosts of this run replace what they serve."""
    chosen = [host for host in state.inventory if state.is_host_in_limit(host)]
    settings = {host.name: known_of(host).found.settings for host in chosen}
    rollouts = {name: one.rollout for name, one in settings.items()}
    return waves_of(rollouts, (one.cluster.hosts for one in settings.values()))


def plan_for(host: Host) -> HostPlan:
    """Return the plan of ``host``; names it is the first to need are locked and shown."""
    known = known_of(host)
    found, catalog = known.found, known.catalog
    with _locking:
        lock = locked_for(found.settings, catalog, found.lock_path, logger.info)
        lock = held_for(found.settings, catalog, found.lock_path, lock, logger.info)
    fabric = ports_of(found.settings.cluster.hosts)
    request = Request(host.name, found.settings, catalog, lock, payload_identity(), fabric)
    plan = known.plan(request)
    for warning in plan.warnings:
        logger.warning(f"[{host.name}] {warning}")
    return plan


def ports_of(members: Sequence[str]) -> dict[str, Ports]:
    """Ask every host on the cables how it reaches the others.

    Raises:
        PlanError: one of them is no part of this run.
    """
    known = {one.name: one for one in inventory}
    away = [name for name in members if name not in known or not known[name].connected]
    if away:
        what = f"cannot be asked for {', '.join(away)}: not reached, or left out by --limit"
        fix = "name all of them, and have all of them up: each is asked about its ports"
        raise PlanError.one(f"cluster of {', '.join(members)}", what, fix)
    return {name: known[name].get_fact(Fabric, _sudo=False) for name in members}


_PACKAGE = Path(__file__).resolve().parents[1]


def read_inventory(
    path: Path,
    *,
    data: Sequence[str] = (),
    limit: Sequence[str] = (),
    exclude: Sequence[str] = (),
    judged: bool = True,
    deploy: str = "",
) -> dict[str, dict[str, Any]]:
    """Run an inventory file outside pyinfra and return pyinfra's data of each chosen host.

    Plain inventories of pyinfra, lists of names without ``group_from``, get their settings here.
    With ``judged=False`` hosts may choose what cannot be served: nothing is planned from it.
    """
    listed = _hosts_of_text(str(path)) if not path.exists() else None
    if listed is None and not path.is_file():
        raise no_inventory(str(path))
    # What pyinfra would have been called with; inventory files look nowhere else.
    with click.Context(click.Command("spark-deploy")) as context:
        context.params.update(
            inventory=str(path), data=data, limit=limit, exclude=exclude, judged=judged,
            bootstraps=deploy.endswith("bootstrap.py"),
        )  # fmt: skip
        groups = _with_settings({"hosts": listed} if listed else _run(path), path)
    hosts = {host: more for members, _ in groups.values() for host, more in members}
    if not hosts:
        raise _no_host(path)
    members = {name: [host for host, _ in value[0]] for name, value in groups.items()}
    chosen = chosen_hosts({"limit": limit, "exclude": exclude}, members, path.stem)
    return {host: hosts[host] for host in chosen}


def check_inventory() -> None:
    """Refuse an inventory that is none or names no host, for a ``config.py``, which comes first.

    pyinfra itself would go on without a host, change nothing and exit 0. Files with ``group_from``
    refuse an empty list by themselves.
    """
    path = Path(named_inventory())
    if path.suffix != ".py" or not path.is_file() or "group_from" in path.read_text("utf-8"):
        return
    found = _run(path)
    groups = {name: one[0] if _is_group(one) else one for name, one in found.items()}
    # pyinfra takes no group with anything else in it, and goes on with the others.
    taken = [one for one in groups.values() if all(isinstance(host, (str, tuple)) for host in one)]
    if any(taken):
        return
    if len(taken) < len(groups):
        raise SettingsError(list(host_problems(groups, file=str(path))))
    raise _no_host(path)


def _no_host(path: Path) -> SettingsError:
    fix = "list hosts in it, as inventory/spark.py does"
    return SettingsError.one(str(path), "names no host", fix)


def _hosts_of_text(named: str) -> list[str] | None:
    """Return the hosts of ``spark-1,spark-2`` or ``@local``, which pyinfra takes as well."""
    if "," in named or named.startswith("@"):
        return [host for host in named.split(",") if host]
    return None


def _run(path: Path) -> dict[str, Any]:
    """Return the groups of an inventory file: every list, and every pair of a list and data."""
    try:
        names = runpy.run_path(str(path))
    except SettingsError:
        raise
    except Exception as error:  # whatever a file of the user's does
        frames = traceback.extract_tb(error.__traceback__)
        if any(Path(frame.filename).is_relative_to(_PACKAGE) for frame in frames[1:]):
            raise  # raised by this package: the inventory file is not the cause
        last = frames[-1]
        line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
        line = line or (last.lineno if Path(last.filename).name == path.name else None)
        where = f"{path} line {line}" if line else str(path)
        what = f"cannot be run: {type(error).__name__}: {error}"
        raise SettingsError.one(where, what, "correct the inventory file") from error
    return {
        name: value
        for name, value in names.items()
        if not name.startswith("_") and isinstance(value, (list, tuple))
    }


def _with_settings(found: Mapping[str, Any], path: Path) -> dict[str, Group]:
    """Return the groups of an inventory, those that are plain lists of pyinfra with settings."""
    ours = {name: value for name, value in found.items() if _is_ours(value)}
    known = {host for members, _ in ours.values() for host, _ in members}
    plain: dict[str, list[Any]] = {}
    data: dict[str, Any] = {}
    for name, value in found.items():
        if name in ours:
            continue
        members, shared = value if _is_group(value) else (value, {})
        for one in members:
            host, more = one if _is_pair(one) else (one, {})
            if isinstance(host, str) and host in known:
                continue  # pyinfra lets a host be in several groups
            if isinstance(host, str):
                known.add(host)
                data[host] = {**shared, **more}
            plain.setdefault(name, []).append(host)
    return ours | (groups_from(plain, file=str(path), host_data=data) if plain else {})


def _is_group(value: Any) -> bool:
    return _is_pair(value) and isinstance(value[0], (list, tuple))


def _is_pair(value: Any) -> bool:
    """Tell a name or a list of names that has data beside it."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)


def _is_ours(value: Any) -> bool:
    """Tell what ``group_from`` returns."""
    if not _is_group(value) or not value[0]:
        return False
    return all(_is_pair(one) and KEY in one[1] for one in value[0])
