"""``spark-deploy update``: write commits and digests of the names in use to the lock file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from spark_deploy.cli.hosts import Target, select_hosts
from spark_deploy.cli.options import Options, shared_options
from spark_deploy.cli.terminal import note
from spark_deploy.config.documents.declare import typed
from spark_deploy.config.documents.schema_check import closest
from spark_deploy.config.errors import LockError
from spark_deploy.inventory.host_names import hold_if_told, open_questions, unread
from spark_deploy.lock.file import read_lock, write_lock
from spark_deploy.lock.resolve import Names, refuse_two_revisions, resolve, wanted_by
from spark_deploy.lock.types import Lock


@click.command
@click.option("--only", multiple=True, metavar="NAME", help="Only this repository or image.")
@click.option("--missing", is_flag=True, help="Lock only names that are not locked yet.")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a name is missing.")
@click.option("--counted", is_flag=True, help="Read measured KV-cache sizes from hosts.")
@shared_options(plans=True)
def update(options: Options, only: Sequence[str], missing: bool, check: bool, counted: bool) -> int:
    """Update each lock file once."""
    return lock(options, Choice(tuple(only), missing, check, counted))


@dataclass(frozen=True, slots=True)
class Choice:
    """What to lock."""

    only: tuple[str, ...] = ()
    missing: bool = False
    check: bool = False
    counted: bool = False


def lock(options: Options, choice: Choice) -> int:
    """Update each lock file once; 1 if ``check`` finds something missing."""
    by_path: dict[Path, list[Target]] = {}
    for host in select_hosts(options):
        by_path.setdefault(host.settings.lock_path, []).append(host)
    missing = 0
    for path, hosts in by_path.items():
        missing += _lock_file(path, hosts, choice)
    if options.json:
        print(
            json.dumps(
                {str(path): typed(read_lock(path), nulls=False) for path in by_path}, indent=1
            )
        )
    return 1 if choice.check and missing else 0


def _lock_file(path: Path, hosts: list[Target], choice: Choice) -> int:
    before = lock = read_lock(path)
    _refuse_unknown(choice.only, hosts)
    done: set[str] = set()
    wanted_by_all = [wanted_by(host.settings.settings, host.catalog) for host in hosts]
    refuse_two_revisions(set().union(*(wanted.sources for wanted in wanted_by_all)))
    for host, wanted in zip(hosts, wanted_by_all, strict=True):
        settings = host.settings.settings
        todo = _named(wanted, choice.only)
        if choice.missing or choice.check:
            todo = todo.missing_in(lock)
        todo = todo.without(done)
        done.update(todo.names)
        if todo.names and not choice.check:
            lock = resolve(lock, todo, settings, host.catalog.engines.engines, note)
    if choice.check:
        lacks = {f"{name} is not locked" for name in done} or _open_names(hosts, lock)
        for what in sorted(lacks):
            note(f"{path.name}: {what}")
        return len(lacks)
    for host in hosts:
        lock = hold_if_told(host.settings.settings, host.catalog, lock, note)
    if choice.counted:
        from spark_deploy.cli.counted import with_counts

        lock = with_counts(lock, hosts)
    if lock == before:
        note(f"{path}: nothing to write, {len(lock.sources) + len(lock.images)} names are locked")
    else:
        write_lock(path, lock)
        note(f"{path}: written ({_difference(before, lock)})")
    return 0


def _open_names(hosts: list[Target], lock: Lock) -> set[str]:
    """Return builds without verified tensor names, and repositories without read headers."""
    asked = (open_questions(host.settings.settings, host.catalog, lock) for host in hosts)
    lacks = {f"names of {one.build} are not held" for found in asked for one, _ in found}
    read = (unread(host.settings.settings, host.catalog, lock) for host in hosts)
    return lacks | {f"headers of {one.repository} are not read" for open_ in read for one in open_}


def _named(wanted: Names, names: Sequence[str]) -> Names:
    if not names:
        return wanted
    return Names(
        frozenset(source for source in wanted.sources if source[0] in names),
        frozenset(image for image in wanted.images if image in names),
    )


def _refuse_unknown(names: Sequence[str], hosts: list[Target]) -> None:
    wanted = (wanted_by(host.settings.settings, host.catalog) for host in hosts)
    known = sorted({name for one in wanted for name in one.names})
    for name in names:
        if name not in known:
            guess = closest(name, known)
            fix = f"did you mean {guess}?" if guess else f"in use: {', '.join(known)}"
            raise LockError.one(f"--only {name}", "no host of the inventory uses it", fix)


def _difference(before: Lock, after: Lock) -> str:
    old, new = (
        {
            (kind, name): one
            for kind in ("sources", "images", "names", "anatomies")
            for name, one in getattr(lock, kind).items()
        }
        for lock in (before, after)
    )
    added = len(set(new) - set(old))
    moved = sum(1 for name in set(new) & set(old) if new[name] != old[name])
    return f"{added} added, {moved} moved"
