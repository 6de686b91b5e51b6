"""What an inventory file found out about a host; it travels in pyinfra's data of that host.

The inventory file and the deploy run in one process, one after the other, and share nothing else.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pyinfra.api.host import Host
from spark_contract.orders import BuildPlan

from spark_deploy.config.catalog.model import PlainModel
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.errors import LockError, Problem, SettingsError
from spark_deploy.config.schema_errors import closest
from spark_deploy.config.settings.load import HostSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts.certificates import is_address
from spark_deploy.lock import headers
from spark_deploy.lock.file import checked, write_lock
from spark_deploy.lock.headers import read_anatomy
from spark_deploy.lock.resolve import beside_of, size
from spark_deploy.lock.types import HeldNames, Lock
from spark_deploy.plan.artifacts import checkpoint_plan
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.resolve import Request, pair_of
from spark_deploy.plan.types import HostPlan, SourcePlan

# A host that is none, two names that a missing comma joined, a file of settings that nobody
# reads: pyinfra would take the first for a name and pass over the others.

_LOCK_FIX = "run `spark-deploy update --missing` and keep the file"


LOCAL = "@local"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_FOLDERS = {"group_vars": "group", "host_vars": "host"}
# Forms in which other tools keep variables; people bring them along, and nothing reads them here.
_LIKE_SETTINGS = ("", ".yml", ".yaml", ".json", ".toml", ".py")
_BETWEEN = (tokenize.NL, tokenize.COMMENT)


def host_problems(groups: Mapping[str, Any], *, file: str) -> Iterator[Problem]:
    """Yield what is wrong with the lists of hosts that an inventory file gives."""
    joined = dict(_joined_names(Path(file)))
    seen: dict[str, str] = {}
    for group, hosts in groups.items():
        where = f"{Path(file).name}: hosts of {group}"
        if not isinstance(hosts, (list, tuple)):
            yield Problem(where, f"{hosts!r} is no list", 'write hosts=["spark-1", "spark-2"]')
            continue
        if not hosts:
            yield Problem(where, "the list is empty", "name at least one host, or drop the group")
        for host in hosts:
            if not isinstance(host, str):
                fix = "write each name as text in quotes; settings belong into host_vars"
                yield Problem(where, f"{host!r} is no name", fix)
                continue
            if host in joined:
                yield Problem(f"{where} {joined[host][0]}", *joined[host][1:])
            elif wrong := _wrong_name(host):
                yield Problem(f"{where}: {host!r}", *wrong)
            elif host in seen:
                again = seen[host] == group
                what = "is listed twice" if again else f"is in the groups {seen[host]} and {group}"
                fix = "list it once" if again else "list every host in one group only"
                yield Problem(f"{where}: {host}", what, fix)
            seen[host] = group


def _wrong_name(host: str) -> tuple[str, str] | None:
    """Return what is wrong with one name, and what to do."""
    if host.startswith("@"):
        if host == LOCAL:
            return None
        return "is no host: of pyinfra's connectors only @local works here", f"write {LOCAL}"
    user, sign, rest = host.partition("@")
    if sign:
        return "holds a login", f"write {rest!r}, and `ssh: {{user: {user}}}` in its host_vars"
    if is_address(host):
        return None
    name, _, port = host.rpartition(":")
    if _NAME.fullmatch(name) and port.isdecimal():
        return "holds a port", f"write {name!r}, and `ssh: {{port: {port}}}` in its host_vars"
    if not _NAME.fullmatch(host) or set(host) <= set("0123456789."):
        return "is no name or address of a host", "write a name as ssh knows it, such as spark-1"
    return None


def _joined_names(file: Path) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yield each text that Python made of several in a row: a comma is missing between them."""
    for run in _strings_in_a_row(file):
        parts = [ast.literal_eval(token.string) for token in run]
        if len(parts) > 1 and all(isinstance(part, str) for part in parts):
            named = " and ".join(f'"{part}"' for part in parts)
            said = f"line {run[0].start[0]}", f"{named} are one name", "put a comma between them"
            yield "".join(parts), said


def _strings_in_a_row(file: Path) -> Iterator[list[tokenize.TokenInfo]]:
    run: list[tokenize.TokenInfo] = []
    for token in _tokens(file):
        if token.type == tokenize.STRING and not token.string.lower().startswith(("f", "rf", "fr")):
            run.append(token)
        elif token.type not in _BETWEEN:
            yield run
            run = []


def _tokens(file: Path) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens of a Python file; none of one that is not there or cannot be read."""
    if not file.is_file():
        return
    try:
        with tokenize.open(file) as text:
            yield from tokenize.generate_tokens(text.readline)
    except (OSError, SyntaxError, UnicodeDecodeError, tokenize.TokenError):
        return  # whoever runs the file says it better


def stray_files(groups: Mapping[str, Sequence[str]], *, root: Path, file: str) -> Iterator[Problem]:
    """Yield files of settings that no group and no host of the inventory would ever read.

    Several inventories may share the folders: what another one beside names is not judged.
    """
    own = {
        "group_vars": {"all", *groups},
        "host_vars": {host.removeprefix("@") for hosts in groups.values() for host in hosts},
    }
    others = _named_by_others(root, Path(file).resolve())
    for folder, kind in _FOLDERS.items():
        for path in sorted((root / folder).glob("[!._]*")):
            known = path.name in own[folder] or path.stem in own[folder]
            if path.suffix == ".yml" and path.is_file() and (known or path.stem in others):
                continue
            if path.suffix not in _LIKE_SETTINGS and not known:
                continue
            shown = f"{folder}/{path.name}"
            if path.suffix != ".yml" or path.is_dir():
                stem = path.name if path.name in own[folder] else path.stem
                fix = f"write it as {folder}/{stem}.yml, one file"
                yield Problem(shown, "is not read: settings are files that end in .yml", fix)
                continue
            guess = closest(path.stem, sorted(own[folder]))
            fix = f"did you mean {folder}/{guess}.yml?" if guess else "rename or remove it"
            yield Problem(shown, f"belongs to no {kind} of {Path(file).name}", fix)


def _named_by_others(root: Path, file: Path) -> set[str]:
    """Return every word and text in the other inventories that may use the same folders."""
    folders = {root, root / "inventory", root / "inventories", file.parent}
    beside = {path for folder in folders for path in folder.glob("*.py")} - {file}
    words: set[str] = set()
    for path in beside:
        for token in _tokens(path):
            if token.type in (tokenize.STRING, tokenize.NAME):
                words.add(token.string.strip("\"'").removeprefix("@"))
    return words


Say = Callable[[str], None]


class Unread(NamedTuple):
    """A repository whose headers nobody read at its commit, and files that are not its weights."""

    repository: str
    commit: str
    leave_out: tuple[str, ...]


def open_questions(
    settings: Settings, catalog: Catalog, lock: Lock
) -> Iterator[tuple[HeldNames, BuildPlan]]:
    """Yield every build of a host whose names the lock says nothing of; its sources are locked."""
    for one in settings.all_served:
        if one.checkpoint.requantized:
            continue  # no hub has its base; the builder holds it when it is there
        plan = checkpoint_plan(*pair_of(one, catalog), one, lock)
        if plan is not None and isinstance(plan.base, SourcePlan):
            asked = headers.question(plan.order, plan.base.locked, plan.donor)
            if not lock.holds(asked):
                yield asked, plan.order


def unread(settings: Settings, catalog: Catalog, lock: Lock) -> Iterator[Unread]:
    """Yield every repository served as published whose headers the lock says nothing of."""
    for one in settings.all_served:
        model = catalog.model(one.model)
        wanted: list[tuple[str, str, tuple[str, ...]]] = [
            (*each, ()) for each in beside_of(model, catalog.profile(one.profile, one.model))
        ]
        if isinstance(model, PlainModel):
            wanted.append((model.repository, model.revision, model.leave_out))
        for repository, revision, leave_out in wanted:
            locked = lock.source(repository, revision)
            read = lock.anatomies.get(repository)
            if locked is not None and (read is None or read.leave_out != leave_out):
                yield Unread(repository, locked.commit, leave_out)


def read_repositories(settings: Settings, catalog: Catalog, lock: Lock, say: Say) -> Lock:
    """Return the lock with what headers say of repositories that are served as published."""
    for one in dict.fromkeys(unread(settings, catalog, lock)):
        found = read_anatomy(one.repository, one.commit, settings.hub, leave_out=one.leave_out)
        lock = checked(lock.also(anatomies=[found]))
        say(f"  {one.repository}: {found.architecture or 'no architecture named'}, weights "
            f"{size(found.weights_bytes)}")  # fmt: skip
    return lock


def hold_names(settings: Settings, catalog: Catalog, lock: Lock, say: Say) -> Lock:
    """Return the lock with what was found of every build; the hub is asked for what is open.

    Raises:
        HubSilent: The hub did not send the headers.
        LockError: Base or donor are not what the catalog says, or a repository is no model.
    """
    lock = read_repositories(settings, catalog, lock, say)
    for asked, order in open_questions(settings, catalog, lock):
        found = headers.check_names(asked, order, settings.hub)
        lock = lock.also(names=[found])
        say(f"  {asked.build}: {_found(found)} are as the catalog says")
    return lock


def hold_if_told(settings: Settings, catalog: Catalog, lock: Lock, say: Say) -> Lock:
    """Return what ``hold_names`` does; a hub that is silent is said, and asked the next time."""
    try:
        return hold_names(settings, catalog, lock, say)
    except headers.HubSilent as error:
        say(f"names are not held against the catalog yet: {error.problems[0].line}")
        return lock


def held_for(settings: Settings, catalog: Catalog, path: Path, lock: Lock, say: Say) -> Lock:
    """Return the lock for a deploy, with new findings written down where that is allowed."""
    if settings.locked == "required":
        for asked, _ in open_questions(settings, catalog, lock):
            say(f"{path.name}: names of {asked.build} are not verified; " + _LOCK_FIX)
        for one in unread(settings, catalog, lock):
            what = f"headers of {one.repository} are not read yet"
            raise LockError.one(path.name, what, _LOCK_FIX)
        return lock
    held = hold_if_told(settings, catalog, lock, say)
    if held != lock:
        write_lock(path, held)
    return held


def _found(held: HeldNames) -> str:
    """Say whose names were looked at: ``464 names of ORG/BASE and 80 of ORG/DONOR``."""
    counted = [(held.base_tensors, held.base), (held.donor_tensors, held.donor)]
    base, *donor = (
        f"{count:,} names of {place.split('@')[0]}" for count, place in counted if place
    )
    return " and ".join([base, *donor])


KEY = "spark_deploy"


@dataclass(frozen=True, slots=True)
class Known:
    """The settings of one host and the catalog they were checked with."""

    found: HostSettings
    catalog: Catalog
    plans: list[tuple[Request, HostPlan]] = field(default_factory=list, compare=False, repr=False)

    def plan(self, request: Request) -> HostPlan:
        """Plan the host, once for each different request of a process."""
        for earlier, plan in self.plans:
            if earlier == request:
                return plan
        plan = plan_host(request)
        self.plans.append((request, plan))
        return plan

    def to_json(self) -> dict[str, str]:
        """Say for ``debug-inventory`` where the settings come from."""
        return {"group": self.found.group, "folder": str(Path(self.found.root))}


def known_of(host: Host) -> Known:
    """Return what an inventory file of ours knows of ``host``.

    Raises:
        SettingsError: no inventory file of ours named it.
    """
    known = host.data.get(KEY)
    if not isinstance(known, Known):
        fix = (
            "run with an inventory file, such as inventory/spark.py; for this machine list '@local'"
        )
        raise SettingsError.one(host.name, "no inventory file of ours named this host", fix)
    return known
