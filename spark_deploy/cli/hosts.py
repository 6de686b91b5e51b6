"""The hosts that a command selects, with their settings and plans."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spark_contract.units import MAIN_SERVICE

from spark_deploy.cli.options import Options
from spark_deploy.cli.terminal import note
from spark_deploy.config.catalog.anatomy import Anatomy
from spark_deploy.config.catalog.model import PlainModel
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SettingsError, SparkError
from spark_deploy.config.schema_errors import closest
from spark_deploy.config.settings.load import HostSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.inventory.host_names import KEY, Known, read_repositories
from spark_deploy.inventory.plans import payload_identity, read_inventory
from spark_deploy.lock.file import read_lock
from spark_deploy.lock.resolve import beside_of, resolve, wanted_by
from spark_deploy.lock.types import Lock, LockedImage, LockedSource, SourceFile
from spark_deploy.plan.artifacts import original_bytes
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.memory import weights_of
from spark_deploy.plan.resolve import Request
from spark_deploy.plan.types import HostPlan

ESTIMATED_COMMIT = "0" * 40
_ESTIMATED_SHA256 = "0" * 64
_ESTIMATED_IMAGE_BYTES = 10_000_000_000


@dataclass(frozen=True, slots=True)
class Target:
    """One host of an inventory: pyinfra's data, our settings and catalog."""

    name: str
    data: dict[str, Any]
    settings: HostSettings
    catalog: Catalog
    # Answers of hub and registries by lock file, shared by all hosts of the command.
    looked_up: dict[Path, Lock] = field(default_factory=dict)

    def serving(self, model: str, profile: str) -> Target:
        """Return the host with only this pair in its settings."""
        settings = replace(
            self.settings.settings, model=model, profile=profile, keep_ready=(), schedule=()
        )
        return replace(self, settings=replace(self.settings, settings=settings))


def select_hosts(options: Options, *, judged: bool = True, deploy: str = "") -> list[Target]:
    """Return the hosts that the command line selects.

    ``judged=False`` accepts settings that cannot be served, for commands that do not serve them.
    ``deploy`` is the deploy to run on them, for which the inventory may prepare.
    """
    pair = {key: getattr(options, key) for key in ("model", "profile") if getattr(options, key)}
    data = [*options.data, *(f"{key}={value}" for key, value in pair.items())]
    try:
        inventory = read_inventory(
            inventory_path(options),
            data=data, limit=options.limit, exclude=options.exclude, judged=judged,
            deploy=deploy,
        )  # fmt: skip
    except SettingsError as error:
        flags = {f"--data: {key}": f"--{key}" for key in pair}
        raise SettingsError(
            [
                replace(problem, where=flags.get(problem.where, problem.where))
                for problem in error.problems
            ]
        ) from error
    looked_up: dict[Path, Lock] = {}
    return [
        Target(name, host_data, host_data[KEY].found, host_data[KEY].catalog, looked_up)
        for name, host_data in inventory.items()
    ]


def all_host_names(options: Options) -> list[str]:
    return list(read_inventory(inventory_path(options), data=list(options.data), judged=False))


def inventory_path(options: Options) -> Path:
    """Return the given inventory, or that of the working directory or the checkout.

    Raises:
        SettingsError: none exists; an installed package contains no inventory.
    """
    default = Path("inventory/spark.py")
    if options.inventory:
        return Path(options.inventory)
    for path in (default, CHECKOUT / default):
        if path.is_file():
            return path
    fix = "run `spark-deploy init DIR` and change to DIR; or set --inventory"
    raise SettingsError.one(str(default), "is missing in this directory", fix)


def build_plan(host: Target, *, estimate: bool = False) -> HostPlan:
    """Return the plan of a host; look up missing names without writing the lock file."""
    settings, catalog = host.settings.settings, host.catalog
    path = host.settings.lock_path
    lock = host.looked_up.get(path) or read_lock(path)
    missing = wanted_by(settings, catalog).missing_in(lock)
    if missing.names and estimate:
        lock = with_estimates(lock, settings, catalog)
    elif missing.names:
        note("not locked yet, querying the hub (`spark-deploy update --missing` locks it):")
        lock = resolve(lock, missing, settings, catalog.engines.engines, note)
    if not estimate:
        lock = host.looked_up[path] = read_repositories(settings, catalog, lock, note)
    request = Request(host.name, settings, catalog, lock, payload_identity())
    known: Known | None = host.data.get(KEY)
    return known.plan(request) if known else plan_host(request)


def with_estimates(lock: Lock, settings: Settings, catalog: Catalog) -> Lock:
    """Add estimated sizes, by architecture, for names that are not locked."""
    missing = wanted_by(settings, catalog).missing_in(lock)
    size_bytes: dict[str | None, int] = {}
    for name in {served.model for served in settings.all_served}:
        model = catalog.model(name)
        for pair, profile in catalog.profiles.items():
            if pair[1] == name:
                size_bytes |= dict.fromkeys((repo for repo, _ in beside_of(model, profile)), 0)
        if isinstance(model, PlainModel):
            size_bytes[model.repository] = 0  # unknown
            continue
        repositories = (model.sources.base, model.sources.donor, model.sources.hybrid)
        size_bytes[model.sources.original] = original_bytes(model.architecture)
        size_bytes |= dict.fromkeys(repositories, weights_of(model.architecture).tree_bytes)
    sources = [
        LockedSource(
            repo, revision, ESTIMATED_COMMIT,
            (SourceFile("estimate", size_bytes[repo], _ESTIMATED_SHA256),),
        )
        for repo, revision in missing.sources
    ]  # fmt: skip
    images = [
        LockedImage(name, f"sha256:{_ESTIMATED_SHA256}", _ESTIMATED_IMAGE_BYTES)
        for name in missing.images
    ]
    unread = [Anatomy(repository=source.repo, commit=ESTIMATED_COMMIT) for source in sources]
    return lock.also(sources, images, anatomies=unread)


def chosen_services(host: Target, service: str | None) -> list[str]:
    """Return the named service, or all services of the host.

    Raises:
        SparkError: the host has no such service.
    """
    services = [MAIN_SERVICE, *host.settings.settings.services]
    if service is None:
        return services
    if service not in services:
        guess = closest(service, services)
        fix = f"did you mean {guess}?" if guess else f"choose from: {', '.join(services)}"
        raise SparkError.one(f"--service {service}", f"{host.name} has no such service", fix)
    return [service]
