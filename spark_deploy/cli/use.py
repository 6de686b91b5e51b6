"""``spark-deploy use`` and ``settings``: edit the choice in settings files; print all settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import yaml
from spark_contract import files
from spark_contract.documents import plain

from spark_deploy.cli.catalog_files import schema_line
from spark_deploy.cli.console import (
    Options,
    names_of,
    next_command,
    note,
    print_result,
    shared_options,
)
from spark_deploy.cli.hosts import Target, select_hosts
from spark_deploy.cli.models import fitting_profiles
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import Problem, SettingsError, SparkError
from spark_deploy.config.schema_errors import closest, dotted
from spark_deploy.config.settings.load import HostSettings
from spark_deploy.config.settings.types import broken_rules
from spark_deploy.inventory.groups import refuse_conflicts


@dataclass(frozen=True, slots=True)
class Edit:
    file: Path
    key: str
    before: str | None  # None: the key was missing
    after: str
    hosts: tuple[str, ...]


@click.command
@click.argument(
    "choice", metavar="MODEL|PROFILE|MODEL/PROFILE", shell_complete=names_of("models", "profiles")
)
@click.option("--dry", is_flag=True, help="Show the changes without making them.")
@shared_options()
def use(options: Options, choice: str) -> int:
    edits, hosts = select(options, choice)
    print_result(options, edits_data(edits), ([edit_line(edit)] for edit in edits), between="\n")
    if not edits:
        note("already selected")
    elif not options.dry:
        note(f"to deploy it: {next_command(options, 'up', *hosts)}")
    return 0


@click.command
@shared_options(hosts=False)
def settings(options: Options) -> int:
    text = (CHECKOUT / "group_vars/all.yml").read_text("utf-8")
    print(json.dumps(yaml.safe_load(text), indent=1) if options.json else text.rstrip("\n"))
    return 0


def select(options: Options, choice: str) -> tuple[list[Edit], list[str]]:
    """Write the choice; return changed lines and host names. Refuses an impossible choice."""
    # The current choice may be impossible to serve.
    chosen = select_hosts(options, must_serve=False)
    all_hosts = select_hosts(replace(options, limit=[], exclude=[]), must_serve=False)
    names = {host.name for host in chosen}
    catalog = chosen[0].catalog
    wanted = _parse_choice(choice, catalog)
    if wanted.keys() == {"model"}:
        # A model on its own changes the profile only if the present one cannot serve it.
        fitting = fitting_profiles(wanted["model"], catalog)
        present = {host.settings.settings.profile for host in chosen}
        if fitting and not present <= set(fitting):
            wanted["profile"] = fitting[0]
    _check(all_hosts, names, wanted)
    edits: dict[tuple[Path, str], Edit] = {}
    for host in chosen:
        for key, value in wanted.items():
            if getattr(host.settings.settings, key) == value:
                continue
            file = _file_of(host.settings, key, all_hosts, names)
            known = edits.get((file, key))
            same = (*known.hosts, host.name) if known else (host.name,)
            edits[file, key] = Edit(file, key, _keys_in(file).get(key), value, same)
    for file in dict.fromkeys(edit.file for edit in edits.values()):
        changes = [edit for edit in edits.values() if edit.file == file]
        _write(file, changes, chosen[0].settings.root, dry=options.dry)
    return list(edits.values()), sorted(names)


def edits_data(edits: Sequence[Edit]) -> list[dict[str, Any]]:
    return [{**plain(edit), "file": str(edit.file)} for edit in edits]


def edit_line(edit: Edit) -> str:
    before = f"{edit.before} → " if edit.before else ""
    return f"{edit.file}: {edit.key}: {before}{edit.after} ({', '.join(edit.hosts)})"


def _parse_choice(choice: str, catalog: Catalog) -> dict[str, str]:
    models, profiles = sorted(catalog.models), sorted(set(catalog.profile_names))
    model, slash, profile = choice.partition("/")
    if slash and model in models and profile in profiles:
        return {"model": model, "profile": profile}
    if not slash and choice in models:
        return {"model": choice}
    if not slash and choice in profiles:
        return {"profile": choice}
    wrong = profile if slash and model in models else model
    guess = closest(wrong, [*models, *profiles])
    names = f"models: {', '.join(models)}; profiles: {', '.join(profiles)}"
    fix = f"did you mean {guess}?" if guess else f"choose from {names}"
    raise SparkError.one(f"use {choice}", f"'{wrong}' is not in the catalog", fix)


def _check(all_hosts: Sequence[Target], chosen: set[str], wanted: dict[str, Any]) -> None:
    """Refuse, with every reason, a choice that the chosen hosts could not serve."""
    after: dict[str, HostSettings] = {}
    problems: list[Problem] = []
    for host in all_hosts:
        after[host.name] = host.settings
        if host.name in chosen:
            edited = replace(host.settings.settings, **wanted)
            after[host.name] = replace(host.settings, settings=edited)
            problems += [
                Problem(f"{host.name}: {dotted(error.key)}", error.what, error.fix)
                for error in broken_rules(edited)
            ]
    if problems:
        raise SettingsError(problems)
    refuse_conflicts(after, all_hosts[0].catalog, must_serve=chosen)


def _file_of(host: HostSettings, key: str, all_hosts: Sequence[Target], chosen: set[str]) -> Path:
    """Return the file that sets the key, or the host's own if other hosts use that file."""
    own, group, common = _files(host)
    file = next((path for path in (own, group, common) if key in _keys_in(path)), None)
    if file is None:
        file = common if common.exists() else group
    is_shared = any(file in _files(one.settings) for one in all_hosts if one.name not in chosen)
    return own if is_shared else file


def _files(host: HostSettings) -> tuple[Path, Path, Path]:
    return (
        host.root / "host_vars" / f"{host.host.removeprefix('@')}.yml",
        host.root / "group_vars" / f"{host.group}.yml",
        host.root / "group_vars" / "all.yml",
    )


def _keys_in(file: Path) -> dict[str, str]:
    # Already validated when the hosts were selected.
    data = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    return data if isinstance(data, dict) else {}


def _write(file: Path, edits: Sequence[Edit], root: Path, *, dry: bool) -> None:
    """Change values in a file; keep every other character."""
    # Bytes keep line endings.
    text = file.read_bytes().decode() if file.is_file() else schema_line(root, file, "settings")
    values = {edit.key: edit.after for edit in edits}
    changed = _set_keys(text, values)
    if changed is None:
        keys = " and ".join(f"{key}: {value}" for key, value in values.items())
        raise SparkError.one(str(file), "cannot be edited automatically", f"write {keys} into it")
    if not dry:
        mode = file.stat().st_mode & 0o777 if file.exists() else 0o644
        files.write_text(file, changed, mode)


def _set_keys(text: str, values: dict[str, str]) -> str | None:
    """Set top-level keys of a YAML document; ``None`` if another key would change, too."""
    try:
        root, before = yaml.compose(text), yaml.safe_load(text) or {}
        nodes = {key.value: node for key, node in root.value} if root else {}
        present = [key for key in values if key in nodes]
        for key in sorted(present, key=lambda key: -nodes[key].start_mark.index):
            start, end = nodes[key].start_mark.index, nodes[key].end_mark.index
            text = text[:start] + values[key] + text[end:]
        line_end = "\r\n" if "\r\n" in text else "\n"
        for key in (key for key in values if key not in nodes):
            text += line_end * bool(text and not text.endswith("\n"))
            text += f"{key}: {values[key]}{line_end}"
        return text if yaml.safe_load(text) == {**before, **values} else None
    except (yaml.YAMLError, TypeError, ValueError):
        return None
