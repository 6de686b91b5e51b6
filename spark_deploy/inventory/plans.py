"""Plan each host of a deploy from inventory, lock and network; read inventory files."""

import runpy
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from pyinfra import logger
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.context import inventory
from spark_contract.builder_api import BuildPlan

from spark_deploy.config.catalog.model import PlainModel
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.errors import LockError, PlanError, SettingsError
from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts.network import Fabric
from spark_deploy.hosts.payload import SITE_REQUIREMENTS, quantizer_digest, read_payload
from spark_deploy.inventory.clusters import unknown_host_problems
from spark_deploy.inventory.command_line import inventory_argument, missing_inventory
from spark_deploy.inventory.groups import Group, groups_from, select_hosts
from spark_deploy.inventory.host_names import CONTEXT_KEY, context_of, host_problems
from spark_deploy.lock import headers
from spark_deploy.lock.resolve import (
    companion_repositories,
    format_size,
    load_or_extend_lock,
    validate_lock,
    write_lock,
)
from spark_deploy.lock.types import Lock, VerifiedNames, names_to_verify
from spark_deploy.plan.artifacts import checkpoint_plan
from spark_deploy.plan.cluster import Wave, plan_waves
from spark_deploy.plan.resolve import Request, model_and_profile
from spark_deploy.plan.types import HostPlan, PayloadIdentity, Ports, SourcePlan

# Hosts are planned in parallel; only the first queries the hub.
_hub_queries = threading.Lock()
_PACKAGE = Path(__file__).resolve().parents[1]
_LOCK_FIX = "run `spark-deploy update --missing`, and keep the changed lock file"

Log = Callable[[str], None]


def payload_identity() -> PayloadIdentity:
    payload = read_payload()
    return PayloadIdentity(
        tools_digest=payload.tools_digest,
        image_context_digest=payload.image_context_digest,
        python_requirements=SITE_REQUIREMENTS,
        quantizer_digest=quantizer_digest(),
    )


def waves_for(state: State) -> tuple[Wave, ...]:
    selected = [host for host in state.inventory if state.is_host_in_limit(host)]
    settings_by_host = {host.name: context_of(host).loaded.settings for host in selected}
    rollouts = {name: settings.rollout for name, settings in settings_by_host.items()}
    clusters = (settings.cluster.hosts for settings in settings_by_host.values())
    return plan_waves(rollouts, clusters)


def plan_for(host: Host) -> HostPlan:
    """Return a host's plan; lock and log new names."""
    context = context_of(host)
    loaded, catalog = context.loaded, context.catalog
    with _hub_queries:
        lock = load_or_extend_lock(loaded.settings, catalog, loaded.lock_path, logger.info)
        lock = verified_lock(loaded.settings, catalog, loaded.lock_path, lock, logger.info)
    fabric = ports_of(loaded.settings.cluster.hosts)
    request = Request(host.name, loaded.settings, catalog, lock, payload_identity(), fabric)
    plan = context.plan(request)
    for warning in plan.warnings:
        logger.warning(f"[{host.name}] {warning}")
    return plan


def ports_of(members: Sequence[str]) -> dict[str, Ports]:
    """Return the network ports of each host. Raises PlanError if a host is not connected."""
    hosts = {host.name: host for host in inventory}
    absent = [name for name in members if name not in hosts or not hosts[name].connected]
    if absent:
        message = f"cannot query {', '.join(absent)}: unreachable, or excluded by --limit"
        fix = "start all hosts of the cluster, and include them in the run"
        raise PlanError.single(f"cluster of {', '.join(members)}", message, fix)
    return {name: hosts[name].get_fact(Fabric, _sudo=False) for name in members}


class UnreadRepository(NamedTuple):
    """A repository whose headers the lock lacks; ``leave_out`` lists files without weights."""

    repository: str
    commit: str
    leave_out: tuple[str, ...]


def unverified_builds(
    settings: Settings, catalog: Catalog, lock: Lock
) -> Iterator[tuple[VerifiedNames, BuildPlan]]:
    """Yield the names and plan of each build that the lock does not record as verified."""
    for served in settings.all_models:
        if served.checkpoint.source == "requantized":
            continue  # the host makes this base, so the builder verifies the names
        plan = checkpoint_plan(*model_and_profile(served, catalog), served, lock)
        if plan is not None and isinstance(plan.base, SourcePlan):
            names = names_to_verify(plan.build, plan.base.locked, plan.donor)
            if not lock.has_result_for(names):
                yield names, plan.build


def unread_repositories(
    settings: Settings, catalog: Catalog, lock: Lock
) -> Iterator[UnreadRepository]:
    """Yield required repositories whose headers the lock file lacks."""
    for served in settings.all_models:
        model = catalog.model(served.model)
        profile = catalog.profile(served.profile, served.model)
        required: list[tuple[str, str, tuple[str, ...]]] = [
            (repo, revision, ()) for repo, revision in companion_repositories(model, profile)
        ]
        if isinstance(model, PlainModel):
            required.append((model.repository, model.revision, model.leave_out))
        for repository, revision, leave_out in required:
            locked, metadata = lock.source(repository, revision), lock.repo_metadata.get(repository)
            if locked is not None and (metadata is None or metadata.leave_out != leave_out):
                yield UnreadRepository(repository, locked.commit, leave_out)


def read_headers(settings: Settings, catalog: Catalog, lock: Lock, log: Log) -> Lock:
    """Read the headers that the lock lacks, and return the lock with them."""
    for repository, commit, leave_out in dict.fromkeys(
        unread_repositories(settings, catalog, lock)
    ):
        metadata = headers.read_metadata(repository, commit, settings.hub, leave_out=leave_out)
        lock = validate_lock(lock.with_entries(repo_metadata=[metadata]))
        architecture = metadata.architecture or "unknown architecture"
        log(f"  {repository}: {architecture}, weights {format_size(metadata.weights_bytes)}")
    return lock


def verify_names(settings: Settings, catalog: Catalog, lock: Lock, log: Log) -> Lock:
    """Compare tensor names of builds with the catalog; return the lock with the results.

    Raises LockError if names differ, HeadersUnavailableError if the hub does not respond.
    """
    lock = read_headers(settings, catalog, lock, log)
    for names, build in unverified_builds(settings, catalog, lock):
        verified = headers.check_sources(names, build, settings.hub)
        lock = lock.with_entries(names=[verified])
        compared = f"{verified.base_tensors:,} names in {verified.base.split('@')[0]}"
        if verified.donor:
            repository = verified.donor.split("@")[0]
            compared += f" and {verified.donor_tensors:,} names in {repository}"
        log(f"  {names.build}: {compared} match the catalog")
    return lock


def verify_names_if_online(settings: Settings, catalog: Catalog, lock: Lock, log: Log) -> Lock:
    """Verify names like ``verify_names``; return the unchanged lock if the hub does not respond."""
    try:
        return verify_names(settings, catalog, lock, log)
    except headers.HeadersUnavailableError as error:
        log(f"could not compare tensor names with the catalog: {error.problems[0].line}")
        return lock


def verified_lock(settings: Settings, catalog: Catalog, path: Path, lock: Lock, log: Log) -> Lock:
    """Verify the lock of a deploy and write it; if ``locked`` is ``required``, only check it."""
    if settings.locked == "required":
        for names, _ in unverified_builds(settings, catalog, lock):
            log(f"{path.name}: tensor names in {names.build} have not been verified; {_LOCK_FIX}")
        unread = next(unread_repositories(settings, catalog, lock), None)
        if unread is not None:
            message = f"the headers of {unread.repository} have not been read yet"
            raise LockError.single(path.name, message, _LOCK_FIX)
        return lock
    verified = verify_names_if_online(settings, catalog, lock, log)
    if verified != lock:
        write_lock(path, verified)
    return verified


def read_inventory(
    path: Path,
    *,
    data: Sequence[str] = (),
    limit: Sequence[str] = (),
    exclude: Sequence[str] = (),
    must_serve: bool = True,
    deploy: str = "",
) -> dict[str, dict[str, Any]]:
    """Run an inventory without pyinfra; return pyinfra's data for each selected host.

    Hosts of plain pyinfra inventories also get settings. ``path`` can be a list of hosts.
    """
    hosts = [] if path.exists() else _parse_host_names(str(path))
    if not hosts and not path.is_file():
        raise missing_inventory(str(path))
    # Inventory files read these parameters of the current command.
    with click.Context(click.Command("spark-deploy")) as context:
        context.params.update(
            inventory=str(path), data=data, limit=limit, exclude=exclude, must_serve=must_serve,
            bootstraps=deploy.endswith("bootstrap.py"),
        )  # fmt: skip
        groups = _add_settings_to_groups({"hosts": hosts} if hosts else _run_inventory(path), path)
    data_by_host = {
        host: host_data for members, _ in groups.values() for host, host_data in members
    }
    if not data_by_host:
        raise _no_host_error(path)
    loaded = {host: host_data[CONTEXT_KEY].loaded for host, host_data in data_by_host.items()}
    if not hosts and (problems := list(unknown_host_problems(loaded))):
        raise SettingsError(problems)
    hosts_by_group = {name: [host for host, _ in members] for name, (members, _) in groups.items()}
    selected = select_hosts({"limit": limit, "exclude": exclude}, hosts_by_group, path.stem)
    return {host: data_by_host[host] for host in selected}


def check_inventory() -> None:
    """Raise SettingsError if the inventory is missing or has no host.

    Without hosts, pyinfra would exit 0. ``config.py`` calls this function, because pyinfra reads
    that file first.
    """
    path = Path(inventory_argument())
    if path.suffix != ".py" or not path.is_file() or "group_from" in path.read_text("utf-8"):
        return
    groups = {
        name: group[0] if _has_group_data(group) else group
        for name, group in _run_inventory(path).items()
    }
    # pyinfra ignores groups that contain other values.
    usable = [
        hosts for hosts in groups.values() if all(isinstance(host, (str, tuple)) for host in hosts)
    ]
    if any(usable):
        return
    if len(usable) < len(groups):
        raise SettingsError(list(host_problems(groups, file=str(path))))
    raise _no_host_error(path)


def _no_host_error(path: Path) -> SettingsError:
    return SettingsError.single(str(path), "lists no hosts", "list hosts as in inventory/spark.py")


def _parse_host_names(inventory: str) -> list[str]:
    """Return the hosts in an argument such as ``spark-1,spark-2`` or ``@local``."""
    if "," in inventory or inventory.startswith("@"):
        return [host for host in inventory.split(",") if host]
    return []


def _run_inventory(path: Path) -> dict[str, Any]:
    """Run an inventory file; return its groups, which are host lists or (host list, data)."""
    try:
        variables = runpy.run_path(str(path))
    except SettingsError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if any(Path(frame.filename).is_relative_to(_PACKAGE) for frame in frames[1:]):
            raise  # an error in this package, not in the inventory file
        last = frames[-1]
        line = error.lineno if isinstance(error, SyntaxError) else None
        if not line and Path(last.filename).name == path.name:
            line = last.lineno
        where = f"{path} line {line}" if line else str(path)
        message = f"cannot run: {type(error).__name__}: {error}"
        raise SettingsError.single(where, message, "correct the inventory file") from error
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith("_") and isinstance(value, (list, tuple))
    }


def _add_settings_to_groups(groups: Mapping[str, Any], path: Path) -> dict[str, Group]:
    """Add settings to plain pyinfra groups; keep groups that already have settings."""
    groups_with_settings = {name: group for name, group in groups.items() if _has_settings(group)}
    seen_hosts = {host for members, _ in groups_with_settings.values() for host, _ in members}
    plain_groups: dict[str, list[Any]] = {}
    host_data: dict[str, Any] = {}
    for name, group in groups.items():
        if name in groups_with_settings:
            continue
        members, group_data = group if _has_group_data(group) else (group, {})
        for member in members:
            host, member_data = member if _has_data(member) else (member, {})
            if isinstance(host, str):
                if host in seen_hosts:
                    continue  # pyinfra allows a host in several groups
                seen_hosts.add(host)
                host_data[host] = {**group_data, **member_data}
            plain_groups.setdefault(name, []).append(host)
    if not plain_groups:
        return groups_with_settings
    return groups_with_settings | groups_from(plain_groups, file=str(path), host_data=host_data)


def _has_group_data(value: Any) -> bool:
    """Return whether a group has data besides its list of hosts."""
    return _has_data(value) and isinstance(value[0], (list, tuple))


def _has_data(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)


def _has_settings(group: Any) -> bool:
    """Return whether ``group_from`` made this group."""
    if not _has_group_data(group) or not group[0]:
        return False
    return all(_has_data(member) and CONTEXT_KEY in member[1] for member in group[0])
