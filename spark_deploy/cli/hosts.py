"""The hosts that a command selects: settings, plans, parallel queries and access checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import gevent
from gevent.pool import Pool
from pyinfra.api.config import Config
from pyinfra.api.connect import disconnect_all
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory
from pyinfra.api.state import BaseStateCallback, State, StateStage
from pyinfra.context import ctx_host, ctx_state
from spark_contract.units import MAIN_SERVICE

from spark_deploy.bench.host import ticking
from spark_deploy.cli.console import Options, note, short_list
from spark_deploy.config.catalog.architecture import RepoMetadata
from spark_deploy.config.catalog.model import PlainModel
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.errors import Problem, SettingsError, SparkError, unreachable
from spark_deploy.config.schema_errors import suggest
from spark_deploy.config.settings.load import HostSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts.status import HostStatus, Status
from spark_deploy.inventory import host_keys, login
from spark_deploy.inventory.connections import BOOTSTRAP, CHECK_NETWORK, patch_pyinfra
from spark_deploy.inventory.host_keys import Endpoint, HostKey, readable_ssh_files
from spark_deploy.inventory.host_names import CONTEXT_KEY, HostContext
from spark_deploy.inventory.plans import payload_identity, read_headers, read_inventory
from spark_deploy.lock.resolve import companion_repositories, read_lock, required_names, resolve
from spark_deploy.lock.types import Lock, LockedImage, LockedSource, SourceFile
from spark_deploy.plan.artifacts import original_bytes
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.memory import weight_sizes
from spark_deploy.plan.resolve import Request
from spark_deploy.plan.types import HostPlan

T = TypeVar("T")

ESTIMATED_COMMIT = "0" * 40
_FACT_TIMEOUT_S = 180  # docker on a busy host takes two minutes
QUIET_PERIOD_S = 2.0  # before a note lists hosts that have not answered yet
_ESTIMATED_SHA256 = "0" * 64
_ESTIMATED_IMAGE_BYTES = 10_000_000_000


@dataclass(frozen=True, slots=True)
class Target:
    """One host of an inventory: pyinfra's data, our settings and catalog."""

    name: str
    data: dict[str, Any]
    loaded: HostSettings
    catalog: Catalog
    # Locks with results from the hub and registries by lock file, shared by the command's hosts.
    locks: dict[Path, Lock] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        return self.loaded.settings

    def with_model(self, model: str, profile: str) -> Target:
        settings = replace(self.settings, model=model, profile=profile, keep_ready=(), schedule=())
        return replace(self, loaded=replace(self.loaded, settings=settings))


def select_hosts(options: Options, *, must_serve: bool = True, deploy: str = "") -> list[Target]:
    """Return the hosts that the command line selects.

    ``must_serve`` rejects settings that the hosts cannot serve. ``deploy`` is the file of the
    deploy that will run.
    """
    choice = options.choice
    data = [*options.data, *(f"{key}={value}" for key, value in choice.items())]
    try:
        inventory = read_inventory(
            inventory_path(options), data=data, limit=options.limit, exclude=options.exclude,
            must_serve=must_serve, deploy=deploy,
        )  # fmt: skip
    except SettingsError as error:
        flags = {f"--data: {key}": f"--{key}" for key in choice}
        raise SettingsError([
            replace(problem, where=flags.get(problem.where, problem.where))
            for problem in error.problems
        ]) from error  # fmt: skip
    locks: dict[Path, Lock] = {}
    contexts = {name: host_data[CONTEXT_KEY] for name, host_data in inventory.items()}
    return [
        Target(name, inventory[name], context.loaded, context.catalog, locks)
        for name, context in contexts.items()
    ]


def inventory_path(options: Options) -> Path:
    """Return ``--inventory``, or the first inventory in this directory or a parent."""
    default = Path("inventory/spark.py")
    if options.inventory:
        given = Path(options.inventory)
        return given / default if (given / default).is_file() else given
    in_parents = (directory / default for directory in Path.cwd().parents)
    for path in (default, *filter(_is_trusted, in_parents)):
        if path.is_file():
            return path
    fix = "change to the folder that `spark-deploy init` created, or add --inventory DIR"
    raise SettingsError.single(str(default), "not found in this directory or its parents", fix)


def _is_trusted(inventory: Path) -> bool:
    """Return whether only this user and root can change an inventory, which is a program."""
    paths = (inventory, inventory.parent, inventory.parent.parent)
    try:
        stats = [path.stat() for path in paths]
    except OSError:
        return False
    return all(stat.st_uid in (0, os.getuid()) and not stat.st_mode & 0o022 for stat in stats)


def build_plan(host: Target, *, estimate: bool = False) -> HostPlan:
    """Return a host's plan; look up names that are not locked, or estimate their sizes offline."""
    settings, catalog = host.settings, host.catalog
    path = host.loaded.lock_path
    lock = host.locks.get(path) or read_lock(path)
    missing = required_names(settings, catalog).missing_in(lock)
    if missing.names and estimate:
        lock = with_estimates(lock, settings, catalog)
    elif missing.names:
        note(
            "querying the hub for names that are not in the lock file (`spark-deploy update "
            "--missing` locks them):"
        )
        lock = resolve(lock, missing, settings, catalog.engines.engines, note)
    if not estimate:
        lock = host.locks[path] = read_headers(settings, catalog, lock, note)
    request = Request(host.name, settings, catalog, lock, payload_identity())
    context: HostContext | None = host.data.get(CONTEXT_KEY)
    return context.plan(request) if context else plan_host(request)


def with_estimates(lock: Lock, settings: Settings, catalog: Catalog) -> Lock:
    """Add sizes, estimated from the architecture, for sources and images that are not locked."""
    missing = required_names(settings, catalog).missing_in(lock)
    size_bytes: dict[str | None, int] = {}
    for name in {served.model for served in settings.all_models}:
        model = catalog.model(name)
        for (_, model_name), profile in catalog.profiles.items():
            if model_name == name:
                for repo, _ in companion_repositories(model, profile):
                    size_bytes[repo] = 0  # unknown
        if isinstance(model, PlainModel):
            size_bytes[model.repository] = 0  # unknown
            continue
        repositories = (model.sources.base, model.sources.donor, model.sources.hybrid)
        size_bytes[model.sources.original] = original_bytes(model.architecture)
        size_bytes |= dict.fromkeys(repositories, weight_sizes(model.architecture).tree_bytes)
    sources = [
        LockedSource(
            repo, revision, ESTIMATED_COMMIT,
            # Plans look only for this file.
            (SourceFile("tokenizer.json", size_bytes[repo], _ESTIMATED_SHA256),),
        )
        for repo, revision in missing.sources
    ]  # fmt: skip
    images = [
        LockedImage(name, f"sha256:{_ESTIMATED_SHA256}", _ESTIMATED_IMAGE_BYTES)
        for name in missing.images
    ]
    unread = [RepoMetadata(repository=source.repo, commit=ESTIMATED_COMMIT) for source in sources]
    return lock.with_entries(sources, images, repo_metadata=unread)


def selected_services(host: Target, service: str | None) -> list[str]:
    services = [MAIN_SERVICE, *host.settings.services]
    if service is None:
        return services
    if service not in services:
        fix = suggest(service, services, f"choose from: {', '.join(services)}")
        raise SparkError.single(f"--service {service}", f"{host.name} has no such service", fix)
    return [service]


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    host: Target
    value: T | None
    problem: str = ""

    def data(self) -> dict[str, Any]:
        """Return the JSON fields that all commands print for a host."""
        reachable = self.value is not None
        return {"host": self.host.name, "reachable": reachable, "problem": self.problem}


class _ConnectErrors(BaseStateCallback):
    """Stores why connections failed, because pyinfra only logs the reasons."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def host_connect_error(  # type: ignore[override]  # called on the instance
        self, state: State, host: Host, error: Exception
    ) -> None:
        self.reasons[host.name] = str(error)


def read_status(host: Host, _target: Target) -> HostStatus | None:
    status: HostStatus | None = host.get_fact(Status)
    return status


def query(
    hosts: Sequence[Target], read: Callable[[Host, Target], T | None], *, verb: str = "querying"
) -> list[Answer[T]]:
    """Connect to the hosts in parallel; return the result of ``read`` for each host."""
    data = [(host.name, {"_timeout": _FACT_TIMEOUT_S, **host.data}) for host in hosts]
    inventory = Inventory((data, {}))  # type: ignore[no-untyped-call]  # pyinfra
    state = State(inventory, Config())  # type: ignore[no-untyped-call]  # pyinfra
    errors = _ConnectErrors()
    state.add_callback_handler(errors)  # type: ignore[no-untyped-call]  # pyinfra
    state.set_stage(StateStage.Connect)

    def query_host(host: Host, target: Target) -> Answer[T]:
        with ctx_host.use(host):
            try:
                with readable_ssh_files():
                    host.connect(raise_exceptions=False, show_errors=False)
                if not host.connected:
                    return Answer(target, None, errors.reasons.get(host.name, "unreachable"))
                state.activate_host(host)
                patch_pyinfra()
                value = read(host, target)
            except (PyinfraError, OSError) as error:
                return Answer(target, None, f"query failed: {_explain_failure(host, state, error)}")
        return Answer(
            target, value, "" if value is not None else "the host's response could not be read"
        )

    with ctx_state.use(state):
        tasks = [gevent.spawn(query_host, *both) for both in zip(inventory, hosts, strict=True)]

        def activity() -> str:
            names = [host.name for host, task in zip(hosts, tasks, strict=True) if not task.ready()]
            return f"{verb} {short_list(names)}"

        with ticking(activity, note, first_s=QUIET_PERIOD_S):
            gevent.joinall(tasks, raise_error=True)
        disconnect_all(state)
    return [task.get() for task in tasks]


def query_or_note(
    hosts: Sequence[Target], read: Callable[[Host, Target], T | None]
) -> Iterator[tuple[Target, T]]:
    """Yield the hosts that answered, each with a value; print the problems of the rest."""
    for answer in query(hosts, read):
        if answer.value is None:
            note(f"{answer.host.name}: {answer.problem}")
        else:
            yield answer.host, answer.value


def _explain_failure(host: Host, state: State, error: Exception) -> str:
    """Explain a failed query, because pyinfra reports a failed command as "no hosts left"."""
    if isinstance(error, SparkError):
        return error.problems[0].line
    if host not in state.failed_hosts:
        return str(error)
    if not host.data.get("_sudo"):
        return f"a query on the host failed or ran longer than {_FACT_TIMEOUT_S} s"
    return (
        f"a command failed or ran longer than {_FACT_TIMEOUT_S} s, "
        "or sudo is missing or requires a password; "
        "fix: run `deploys/bootstrap.py`, or set `ssh.user: root`"
    )


@dataclass(frozen=True, slots=True)
class AccessResult:
    unreachable: tuple[HostKey, ...]
    without_access: tuple[Endpoint, ...]  # reachable, but our key or sudo does not work

    def problems(self) -> Iterator[Problem]:
        for host in self.unreachable:
            yield unreachable(host.endpoint.host, host.detail, CHECK_NETWORK)
        for endpoint in self.without_access:
            problem = "sudo requires a password"
            if not endpoint.is_local:
                problem = f"rejects our SSH key, or {problem}"
            yield Problem(endpoint.host, problem, BOOTSTRAP)


def check_access(hosts: Sequence[Target]) -> AccessResult:
    """Try to log in to all hosts in parallel; probe the hosts where the login fails."""
    endpoints = [login.build_endpoint(host.name, host.data) for host in hosts]
    activity = f"connecting to {short_list([host.name for host in hosts])}"
    pool = Pool(16)  # greenlets, because threads would delay the exit after Ctrl-C
    with ticking(activity, note, first_s=QUIET_PERIOD_S):
        results = zip(endpoints, pool.map(login.try_key, endpoints), strict=True)
        failed = [endpoint for endpoint, result in results if not result.ready]
        remote = [endpoint for endpoint in failed if not endpoint.is_local]
        keys = pool.map(host_keys.query_host_key, remote)
    unreachable_keys = tuple(key for key in keys if key.state == "unreachable")
    unreachable_endpoints = [key.endpoint for key in unreachable_keys]
    return AccessResult(
        unreachable_keys, tuple(e for e in failed if e not in unreachable_endpoints)
    )
