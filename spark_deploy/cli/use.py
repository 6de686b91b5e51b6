"""``spark-deploy use``: choose another model or profile where the owner's choice is written.

Nothing is kept beside those files: what a deploy does can be read in them before and after.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import yaml
from spark_contract import files
from spark_contract.documents import plain

from spark_deploy.cli.editors import schema_line
from spark_deploy.cli.hosts import Target, select_hosts
from spark_deploy.cli.options import Options, names_of, shared_options
from spark_deploy.cli.terminal import next_command, note, print_result
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.documents.schema_check import closest, dotted
from spark_deploy.config.errors import Problem, SettingsError, SparkError
from spark_deploy.config.settings.cross_checks import broken
from spark_deploy.config.settings.load import HostSettings
from spark_deploy.inventory.groups import refuse_together

_KEYS = ("model", "profile")


@dataclass(frozen=True, slots=True)
class Edit:
    """One line of one file that changes."""

    file: Path
    key: str
    before: str | None  # None: the file did not say it
    after: str
    hosts: tuple[str, ...]


@click.command
@click.argument(
    "choice", metavar="MODEL|PROFILE|MODEL/PROFILE", shell_complete=names_of("models", "profiles")
)
@click.option("--dry", is_flag=True, help="Print the edits, make none.")
@shared_options()
def use(options: Options, choice: str) -> int:
    """Write the choice into settings files; change no host."""
    edits, hosts = choose(options, choice)
    print_result(options, as_json(edits), ([line_of(edit)] for edit in edits), between="\n")
    if not edits:
        note("the files say so already")
    elif not options.dry:
        note(f"now make it so: {next_command(options, 'up', *hosts)}")
    return 0


def choose(options: Options, choice: str) -> tuple[list[Edit], list[str]]:
    """Write the choice; return the lines that changed, and the hosts that are meant.

    Raises:
        SparkError: they could not serve it, or the files do not let it be written.
    """
    # What is to be replaced may be what cannot be served.
    now = select_hosts(options, judged=False)
    every = select_hosts(replace(options, limit=[], exclude=[]), judged=False)
    model, profile = _meant(choice, now)
    wanted = {"model": model, "profile": profile}
    chosen = {host.name for host in now}
    after = {
        host.name: _with(host, model, profile) if host.name in chosen else host.settings
        for host in every
    }
    _refuse(after, chosen, now[0].catalog)
    edits = list(_edits(now, every, chosen, wanted))
    for file in dict.fromkeys(edit.file for edit in edits):
        changes = [edit for edit in edits if edit.file == file]
        _write(file, changes, now[0].settings.root, dry=options.dry)
    return edits, sorted(chosen)


def as_json(edits: Sequence[Edit]) -> list[dict[str, Any]]:
    """Return the lines that changed as plain data."""
    return [{**plain(edit), "file": str(edit.file)} for edit in edits]


def line_of(edit: Edit) -> str:
    """Say what changed in a line."""
    before = f"{edit.before} → " if edit.before else ""
    return f"{edit.file}: {edit.key}: {before}{edit.after} ({', '.join(edit.hosts)})"


def _with(host: Target, model: str | None, profile: str | None) -> HostSettings:
    own = host.settings.settings
    chosen = replace(own, model=model or own.model, profile=profile or own.profile)
    return replace(host.settings, settings=chosen)


def _refuse(after: Mapping[str, HostSettings], chosen: set[str], catalog: Catalog) -> None:
    """Refuse, with every reason, what the chosen hosts could not serve; nothing is written then.

    What the other hosts choose is left for them.
    """
    problems = [
        Problem(f"{name}: {dotted(one.key)}", one.what, one.fix)
        for name, found in after.items()
        if name in chosen
        for one in broken(found.settings)
    ]
    if problems:
        raise SettingsError(problems)
    refuse_together(after, catalog, judged=chosen)


def _meant(choice: str, hosts: Sequence[Target]) -> tuple[str | None, str | None]:
    """Return the model and the profile that a choice names: MODEL, PROFILE or MODEL/PROFILE.

    Raises:
        SparkError: the catalog knows no such name.
    """
    catalog = hosts[0].catalog
    models, profiles = sorted(catalog.models), sorted(set(catalog.profile_names))
    model, slash, profile = choice.partition("/")
    if slash and model in models and profile in profiles:
        return model, profile
    if not slash and choice in models:
        return choice, None
    if not slash and choice in profiles:
        return None, choice
    wrong = choice if not slash else (model if model not in models else profile)
    guess = closest(wrong, [*models, *profiles])
    known = f"models: {', '.join(models)}; profiles: {', '.join(profiles)}"
    raise SparkError.one(
        f"use {choice}", f"'{wrong}' is in no catalog", f"did you mean {guess}?" if guess else known
    )


def _edits(
    now: Sequence[Target],
    every: Sequence[Target],
    chosen: set[str],
    wanted: dict[str, str | None],
) -> Iterator[Edit]:
    found: dict[tuple[Path, str], Edit] = {}
    for host in now:
        for key in _KEYS:
            value = wanted[key]
            if value is None or getattr(host.settings.settings, key) == value:
                continue
            file = _file_of(host.settings, key, every, chosen)
            before = _said(file).get(key)
            known = found.get((file, key))
            hosts = (*(known.hosts if known else ()), host.name)
            found[file, key] = Edit(file, key, before, value, hosts)
    yield from found.values()


def _file_of(host: HostSettings, key: str, every: Sequence[Target], chosen: set[str]) -> Path:
    """Return the file in which a choice is to be changed.

    It is the one that says it now; where that one also decides for hosts that were not chosen, it
    is the host's own.
    """
    own, group, common = _files(host)
    file = next((one for one in (own, group, common) if key in _said(one)), None)
    if file is None:
        file = common if common.exists() else group
    others = [one for one in every if one.name not in chosen and file in _files(one.settings)]
    return own if file != own and others else file


def _files(host: HostSettings) -> tuple[Path, Path, Path]:
    """Return the owner's files that may speak of a host, the strongest first."""
    name = host.host.removeprefix("@")
    return (
        host.root / "host_vars" / f"{name}.yml",
        host.root / "group_vars" / f"{host.group}.yml",
        host.root / "group_vars" / "all.yml",
    )


def _said(file: Path) -> dict[str, str]:
    # It was read and checked when the hosts were listed.
    data = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    return data if isinstance(data, dict) else {}


def _write(file: Path, edits: Sequence[Edit], root: Path, *, dry: bool) -> None:
    """Change lines of a file and leave all others, comments as well, as they are.

    Raises:
        SparkError: the keys stand in a form that a change of lines does not fit.
    """
    # Bytes, so that line ends stay what they are; a mark of the order of bytes is no part of a key.
    there = file.is_file()
    text = file.read_bytes().decode() if there else schema_line(root, file, "settings")
    mark, text = ("\ufeff", text[1:]) if text.startswith("\ufeff") else ("", text)
    for edit in edits:
        text = _with_line(text, edit.key, edit.after)
    try:
        told = yaml.safe_load(text)
    except yaml.YAMLError:
        told = None
    if not isinstance(told, dict) or any(told.get(edit.key) != edit.after for edit in edits):
        keys = " and ".join(f"{edit.key}: {edit.after}" for edit in edits)
        what = "is written in a way that this does not edit"
        raise SparkError.one(str(file), what, f"write {keys} into it")
    if not dry:
        files.write_text(file, mark + text, file.stat().st_mode & 0o777 if file.exists() else 0o644)


def _with_line(text: str, key: str, value: str) -> str:
    """Return a document with a key of its top level set; a comment behind it stays."""
    line = re.compile(rf"^{key}:[ \t]*[^#\r\n]*?(?P<rest>[ \t]*(#.*)?\r?)$", re.MULTILINE)
    changed, count = line.subn(lambda at: f"{key}: {value}{at['rest']}", text)
    end = "\r\n" if "\r\n" in text else "\n"
    return changed if count else f"{text.rstrip()}{end}{key}: {value}{end}".lstrip("\r\n")
