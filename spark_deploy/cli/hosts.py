"""Which hosts a command is about, and their settings and plans."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spark_contract.documents import plain
from spark_contract.units import MAIN_SERVICE

from spark_deploy.cli.options import Options
from spark_deploy.config.catalog.anatomy import Anatomy
from spark_deploy.config.catalog.model import PlainModel
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.documents.schema_check import closest
from spark_deploy.config.documents.shown import shown
from spark_deploy.config.errors import SettingsError, SparkError
from spark_deploy.config.settings.load import HostSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.inventory.host_names import KEY, read_repositories
from spark_deploy.inventory.plans import payload_identity, read_inventory
from spark_deploy.lock.file import read_lock
from spark_deploy.lock.resolve import beside_of, resolve, wanted_by
from spark_deploy.lock.types import Lock, LockedImage, LockedSource, SourceFile
from spark_deploy.plan.checkpoint import original_bytes
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.resolve import Request
from spark_deploy.plan.types import HostPlan
from spark_deploy.plan.weights import weights_of

OPEN_COMMIT = "0" * 40
_OPEN_SHA256 = "0" * 64
_OPEN_DIGEST = f"sha256:{_OPEN_SHA256}"
_GUESSED_IMAGE_BYTES = 10_000_000_000


@dataclass(frozen=True, slots=True)
class Listed:
    """One host of an inventory: pyinfra's data, our settings and catalog."""

    name: str
    data: dict[str, Any]
    settings: HostSettings
    catalog: Catalog
    # By lock file: what hub and registries said already, for all hosts of the command.
    looked_up: dict[Path, Lock] = field(default_factory=dict)

    def serving(self, model: str, profile: str) -> Listed:
        """Return the host as it would be with this pair, and none to have ready beside it."""
        own = replace(
            self.settings.settings, model=model, profile=profile, keep_ready=(), schedule=()
        )
        return replace(self, settings=replace(self.settings, settings=own))


def listed(options: Options, *, judged: bool = True) -> list[Listed]:
    """Return the hosts that the command line names.

    With ``judged=False`` they may choose what cannot be served: for commands that do not serve it.
    """
    path = inventory_of(options)
    pair = {key: getattr(options, key) for key in ("model", "profile") if getattr(options, key)}
    data = [*options.data, *(f"{key}={value}" for key, value in pair.items())]
    try:
        found = read_inventory(
            path, data=data, limit=options.limit, exclude=options.exclude, judged=judged
        )
    except SettingsError as error:  # by the words that were typed
        typed = {f"--data: {key}": f"--{key}" for key in pair}
        problems = [replace(one, where=typed.get(one.where, one.where)) for one in error.problems]
        raise SettingsError(problems) from error
    looked_up: dict[Path, Lock] = {}
    return [
        Listed(name, more, more[KEY].found, more[KEY].catalog, looked_up)
        for name, more in found.items()
    ]


def every_name(options: Options) -> list[str]:
    """Return the names of all hosts of the inventory, those that were not chosen as well."""
    return list(read_inventory(inventory_of(options), data=list(options.data), judged=False))


def inventory_of(options: Options) -> Path:
    """Return the inventory named, else that of the working directory, else of the checkout.

    Raises:
        SettingsError: there is none; what is installed brings no hosts along.
    """
    here = Path("inventory/spark.py")
    if options.inventory:
        return Path(options.inventory)
    for path in (here, CHECKOUT / here):
        if path.is_file():
            return path
    fix = "spark-deploy init DIR, then call this there; or name a file with --inventory"
    raise SettingsError.one(str(here), "is not in this folder", fix)


def planned(host: Listed, *, estimate: bool = False) -> HostPlan:
    """Return the plan of a host; names that are not locked are looked up but not written down."""
    settings, catalog = host.settings.settings, host.catalog
    path = host.settings.lock_path
    lock = host.looked_up.get(path) or read_lock(path)
    missing = wanted_by(settings, catalog).missing_in(lock)
    if missing.names and estimate:
        lock = with_estimates(lock, settings, catalog)
    elif missing.names:
        say("not locked yet, asking the hub (`spark-deploy update --missing` writes it down):")
        lock = host.looked_up[path] = resolve(lock, missing, settings, catalog.engines.engines, say)
    if not estimate:
        lock = host.looked_up[path] = read_repositories(settings, catalog, lock, say)
    return plan_host(Request(host.name, settings, catalog, lock, payload_identity()))


def with_estimates(lock: Lock, settings: Settings, catalog: Catalog) -> Lock:
    """Return the lock with open identities for what is missing, sized by the architecture."""
    missing = wanted_by(settings, catalog).missing_in(lock)
    size_bytes: dict[str | None, int] = {}
    for name in {one.model for one in settings.all_served}:
        model = catalog.model(name)
        for profile in (catalog.profiles[pair] for pair in catalog.profiles if pair[1] == name):
            size_bytes |= dict.fromkeys((repo for repo, _ in beside_of(model, profile)), 0)
        if isinstance(model, PlainModel):
            size_bytes[model.repository] = 0  # nobody read it
            continue
        repositories = (model.sources.base, model.sources.donor, model.sources.hybrid)
        size_bytes[model.sources.original] = original_bytes(model.architecture)
        size_bytes |= dict.fromkeys(repositories, weights_of(model.architecture).tree_bytes)
    sources = [
        LockedSource(
            repo, revision, OPEN_COMMIT, (SourceFile("estimate", size_bytes[repo], _OPEN_SHA256),)
        )
        for repo, revision in missing.sources
    ]
    images = [LockedImage(name, _OPEN_DIGEST, _GUESSED_IMAGE_BYTES) for name in missing.images]
    # Of a repository that nobody read no byte is known, and the plan says so.
    open_ones = [Anatomy(repository=one.repo, commit=OPEN_COMMIT) for one in sources]
    return lock.also(sources, images, anatomies=open_ones)


def chosen_services(host: Listed, service: str | None) -> list[str]:
    """Return the services of a host that a command is about: the one named, else all.

    Raises:
        SparkError: the host has no such service.
    """
    known = [MAIN_SERVICE, *host.settings.settings.services]
    if service is None:
        return known
    if service not in known:
        guess = closest(service, known)
        fix = f"did you mean {guess}?" if guess else f"one of: {', '.join(known)}"
        raise SparkError.one(f"--service {service}", f"is no service of {host.name}", fix)
    return [service]


def answer(
    options: Options,
    found: Any,
    texts: Iterable[Iterable[str]],
    *,
    between: str = "\n\n",
) -> None:
    """Print what a command found: as JSON, or as the lines of each host for people."""
    if options.json:
        print(json.dumps(plain(found), indent=1))
        return
    text = shown(between.join("\n".join(text) for text in texts))
    if text and sys.stdout.isatty():
        from spark_deploy.cli.terminal import show

        show(text.splitlines())
    elif text:
        print(text)


def again(options: Options, *words: str) -> str:
    """Return a command about the same inventory, to be typed next."""
    same = ["--inventory", str(options.inventory)] if options.inventory else []
    return shlex.join([typed("spark-deploy"), *words, *same])


def few(names: Sequence[str]) -> str:
    """Return names as far as a person reads them, else how many they are."""
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} hosts"


def program(name: str) -> Path:
    """Return a program of the environment that this runs in."""
    return Path(sys.executable).with_name(name)


def typed(name: str) -> str:
    """Return what starts a program of ours: its path where the shell finds another, or none."""
    ours, found = program(name), shutil.which(name)
    same = found is not None and os.path.realpath(found) == os.path.realpath(ours)
    return name if same or not ours.exists() else str(ours)


def say(text: str) -> None:
    """Tell a person something that is no part of the answer."""
    from spark_deploy.cli.terminal import tell

    tell(shown(text))
