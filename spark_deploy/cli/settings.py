"""``spark-deploy set``, ``use`` and ``settings``: change settings files, print settings."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import yaml
from spark_contract import files
from spark_contract.documents import to_plain

from spark_deploy.cli.console import (
    Options,
    name_completer,
    next_command,
    note,
    print_result,
    shared_options,
)
from spark_deploy.cli.hosts import Target, inventory_path, select_hosts
from spark_deploy.cli.models import HOST_COUNTS, PLAIN_PROFILE, find_fitting_profiles, schema_line
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.checkout import CHECKOUT, read_mapping
from spark_deploy.config.errors import Problem, SettingsError, SparkError
from spark_deploy.config.schema_errors import suggest
from spark_deploy.config.settings.engine import names_of
from spark_deploy.config.settings.load import HostSettings, with_overrides
from spark_deploy.inventory.clusters import unknown_host_problems, with_replica_addresses
from spark_deploy.inventory.groups import check_conflicts, vars_root

_MISSING = object()
_KEY = re.compile(r"(?P<indent> *)(?P<key>[a-z_0-9]+):")


@dataclass(frozen=True, slots=True)
class Edit:
    file: Path
    key: str
    before: str | None  # None if the key was missing
    after: str
    hosts: tuple[str, ...]


@click.command("set")
@click.option("--dry", is_flag=True, help="Show the changes without making them.")
@shared_options(metavar="KEY=VALUE... [HOST]...")
def set_(options: Options, assignments: Sequence[str]) -> int:
    texts = dict(assignment.split("=", 1) for assignment in assignments)
    if not texts:
        fix = "add a value, for example `set serve.port=8001`"
        raise SparkError.single("set", "no KEY=VALUE given", fix)
    selected = select_hosts(options, must_serve=False)
    all_hosts = select_hosts(replace(options, limit=[], exclude=[]), must_serve=False)
    values = {names_of(key)[0]: _parse_yaml(text) for key, text in texts.items()}
    edits = write_values(selected, all_hosts, values, dry=options.dry, label="set")
    print_edits(options, edits, [host.name for host in selected])
    return 0


def edits_data(edits: Sequence[Edit]) -> list[dict[str, Any]]:
    return [{**to_plain(edit), "file": str(edit.file)} for edit in edits]


def print_edits(options: Options, edits: Sequence[Edit], hosts: Sequence[str]) -> None:
    print_result(options, edits_data(edits), ([edit_line(edit)] for edit in edits), separator="\n")
    if not edits:
        note("already set")
    elif options.dry:
        note("no changes made")
    else:
        note(f"to deploy the change, run `{next_command(options, 'up', *hosts)}`")


def edit_line(edit: Edit) -> str:
    before = f"{edit.before} → " if edit.before else ""
    return f"{edit.file}: {edit.key}: {before}{edit.after} ({', '.join(edit.hosts)})"


def _parse_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def write_values(
    selected: Sequence[Target],
    all_hosts: Sequence[Target],
    values: Mapping[str, Any],
    *,
    dry: bool,
    label: str,
) -> list[Edit]:
    """Write values for dotted keys into the files that set these keys; return the edits.

    Raises SettingsError if a host could not serve the values; the message starts with ``label``.
    """
    selected_names = {host.name for host in selected}
    _check(all_hosts, selected_names, values, label)
    edits: dict[tuple[Path, str], Edit] = {}
    for host in selected:
        for key, value in values.items():
            if _lookup(host.loaded.data, key) == value:
                continue
            file = _file_to_edit(host.loaded, key, all_hosts, selected_names)
            key = next((n for n in names_of(key) if _lookup(_read(file), n) is not _MISSING), key)
            edit = edits.get((file, key))
            names = (*edit.hosts, host.name) if edit else (host.name,)
            old = _lookup(_read(file), key)
            before = None if old is _MISSING else _to_yaml(old)
            edits[file, key] = Edit(file, key, before, _to_yaml(value), names)
    for file in dict.fromkeys(edit.file for edit in edits.values()):
        changes = {edit.key: edit.after for edit in edits.values() if edit.file == file}
        _write(file, changes, selected[0].loaded.root, dry=dry)
    return list(edits.values())


def remove_entry(root: Path, key: str, entry: str, *, dry: bool) -> list[Path]:
    """Remove an entry of a mapping from every settings file; return the changed files."""
    changed = []
    for file in sorted(root.glob("*_vars/*.yml")):
        entries = _lookup(_read(file), key)
        if isinstance(entries, dict) and entry in entries:
            rest = {name: value for name, value in entries.items() if name != entry}
            _write(file, {key: _to_yaml(rest)}, root, dry=dry)
            changed.append(file)
    return changed


def _check(
    all_hosts: Sequence[Target], selected: set[str], values: Mapping[str, Any], label: str
) -> None:
    """Reject values that the selected hosts could not serve; list every reason."""
    after: dict[str, HostSettings] = {}
    problems: list[Problem] = []
    for host in all_hosts:
        after[host.name] = host.loaded
        try:
            if host.name in selected:
                after[host.name] = with_overrides(host.loaded, values, label)
        except SettingsError as error:
            problems += error.problems
    problems += unknown_host_problems(after)
    if problems:
        raise SettingsError(list(dict.fromkeys(problems)))
    check_conflicts(with_replica_addresses(after), all_hosts[0].catalog, must_serve=selected)


def _file_to_edit(
    host: HostSettings, key: str, all_hosts: Sequence[Target], selected: set[str]
) -> Path:
    """Return the file that sets the key, or the host's own file if other hosts share that file."""
    files = host_file, group_file, common_file = _settings_files(host)
    section, _, _ = key.partition(".")
    candidates = itertools.product((*names_of(key), section), files)
    matches = (file for name, file in candidates if _lookup(_read(file), name) is not _MISSING)
    file = next(matches, common_file if common_file.exists() else group_file)
    is_shared = any(
        file in _settings_files(other.loaded) for other in all_hosts if other.name not in selected
    )
    return host_file if is_shared else file


def _settings_files(host: HostSettings) -> tuple[Path, Path, Path]:
    return (
        host.root / "host_vars" / f"{host.host.removeprefix('@')}.yml",
        host.root / "group_vars" / f"{host.group}.yml",
        host.root / "group_vars" / "all.yml",
    )


def _read(file: Path) -> dict[str, Any]:
    # The selection of hosts has validated the file.
    data = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    return data if isinstance(data, dict) else {}


def _lookup(data: Any, key: str) -> Any:
    """Return the value of a dotted key, or ``_MISSING``."""
    for part in key.split("."):
        if not isinstance(data, dict) or part not in data:
            return _MISSING
        data = data[part]
    return data


def _to_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _write(file: Path, values: Mapping[str, str], root: Path, *, dry: bool) -> None:
    """Change values in a file; keep every other character."""
    # Reading text would change line endings.
    text = file.read_bytes().decode() if file.is_file() else schema_line(root, file, "settings")
    if (changed := set_keys(text, values)) is None:
        keys = " and ".join(f"{key}: {value}" for key, value in values.items())
        raise SparkError.single(str(file), "cannot edit this file", f"add to the file: {keys}")
    if not dry:
        files.write_text(file, changed, file.stat().st_mode & 0o777 if file.exists() else 0o644)


def set_keys(text: str, values: Mapping[str, str]) -> str | None:
    """Set dotted keys in a YAML document; return None if another key would change."""
    try:
        for key, value in values.items():
            before = yaml.safe_load(text) or {}
            text = _set_key(text, key.split("."), value)
            expected = _with_value(before, key.split("."), yaml.safe_load(value))
            if yaml.safe_load(text) != expected:
                return None
    except (yaml.YAMLError, TypeError, ValueError):
        return None
    return text


def _with_value(data: Any, parts: list[str], value: Any) -> Any:
    if not parts:
        return value
    data = data or {}
    return {**data, parts[0]: _with_value(data.get(parts[0]), parts[1:], value)}


def _set_key(text: str, parts: list[str], value: str) -> str:
    """Replace the value of a key, or add the key to the innermost mapping that exists."""
    root: Any = yaml.compose(text)
    node, rest = root, list(parts)
    while rest and rest[0] in _entries(node):
        node = _entries(node)[rest.pop(0)]
    if not rest or (node is not root and not _entries(node)):
        for part in reversed(rest):
            value = f"{{{part}: {value}}}"
        start, end = node.start_mark.index, _end_index(node)
        separator = "" if start < end or text[:start].endswith(" ") else " "
        return text[:start] + separator + value + text[end:]
    key, *inner = rest
    for part in reversed(inner):
        value = f"{{{part}: {value}}}"
    line_end = "\r\n" if "\r\n" in text else "\n"
    if isinstance(node, yaml.CollectionNode) and node.flow_style:
        start = node.start_mark.index + 1
        return f"{text[:start]}{key}: {value}{', ' * bool(node.value)}{text[start:]}"
    indent = "" if node is root else " " * node.start_mark.column
    end = len(text) if node is root else text.find("\n", _end_index(node)) + 1 or len(text)
    line_break = line_end if text[:end] and not text[:end].endswith("\n") else ""
    return f"{text[:end]}{line_break}{indent}{key}: {value}{line_end}{text[end:]}"


def _entries(node: Any) -> dict[str, Any]:
    is_mapping = isinstance(node, yaml.MappingNode)
    return {key.value: value for key, value in node.value} if is_mapping else {}


def _end_index(node: yaml.Node) -> int:
    """Return the end of a value, without the comments that follow a block."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end_index(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


@click.command
@click.argument("key", required=False)
@shared_options(hosts=False)
def settings(options: Options, key: str | None) -> int:
    text = (CHECKOUT / "group_vars/all.yml").read_text("utf-8").rstrip("\n")
    defaults = yaml.safe_load(text)
    if key is not None:
        values = dict(_leaves(defaults))
        defaults = {name: value for name, value in values.items() if key in name}
        if not defaults:
            parts = {part for name in values for part in name.split(".")}
            fix = suggest(key, [*values, *parts], "run `spark-deploy settings` to list all")
            raise SparkError.single(f"settings {key}", "no setting name contains this text", fix)
        text = "\n".join([*_matching_lines(text, key), *_changed_values(options, key, values)])
    print(json.dumps(defaults, indent=1) if options.json else text)
    return 0


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _changed_values(options: Options, key: str, defaults: Mapping[str, Any]) -> Iterator[str]:
    """Yield values in this folder that differ from the defaults, with their files."""
    try:
        root = vars_root(str(inventory_path(options)))
    except SettingsError:  # not in a folder of `init`
        return
    for file in sorted(root.glob("*_vars/*.yml")):
        label = file.relative_to(root).as_posix()
        for name, value in _leaves(read_mapping(file, label=label)[0]):
            if key in name and (name not in defaults or value != defaults[name]):
                yield f"# yours: {name}: {_to_yaml(value)} ({label})"


def _matching_lines(text: str, key: str) -> Iterator[str]:
    """Yield the lines whose dotted key contains ``key``, with their comments and sections."""
    path: list[str] = []
    above: list[str] = []  # lines before the next key: comments or the section's key
    for line in text.splitlines():
        match = _KEY.match(line)
        if not match:
            above = [*above, line] if line else []
            continue
        depth = len(match["indent"]) // 2
        path = [*path[:depth], match["key"]]
        if key in ".".join(path):
            yield from (*above, line)
            above = []
        elif line.endswith(":"):
            above = [line]
        else:
            above = [line for line in above if not line.lstrip().startswith("#")]


@click.command
@click.argument(
    "choice",
    metavar="MODEL|PROFILE|MODEL/PROFILE",
    shell_complete=name_completer("models", "profiles"),
)
@click.option("--dry", is_flag=True, help="Show the changes without making them.")
@shared_options()
def use(options: Options, choice: str) -> int:
    edits, hosts = apply_choice(options, choice)
    print_edits(options, edits, hosts)
    if edits and (overrides := _overrides(options)):
        values = ", ".join(f"{key}: {value}" for key, value in overrides)
        unset = {f"{key}={'{}' if text[0] == '{' else 'null'}" for key, text in overrides}
        note(f"these settings still override the profile: {values}")
        note(f"  to remove them, run `{next_command(options, 'set', *sorted(unset))}`")
    return 0


def _overrides(options: Options) -> list[tuple[str, str]]:
    """Return engine settings that override every profile on a selected host, as (key, JSON)."""
    settings = [
        (f"engine.{key}", json.dumps(value))
        for host in select_hosts(options, must_serve=False)
        for key, value in host.loaded.data.get("engine", {}).items()
        if value not in (None, {})
    ]
    return list(dict.fromkeys(settings))


def apply_choice(options: Options, choice: str) -> tuple[list[Edit], list[str]]:
    """Write the choice to settings files; return edits and host names. Reject an invalid choice."""
    # The current settings may be impossible to serve; the new choice may correct them.
    selected = select_hosts(options, must_serve=False)
    all_hosts = select_hosts(replace(options, limit=[], exclude=[]), must_serve=False)
    values = _parse_choice(choice, selected[0].catalog)
    if values.keys() == {"model"}:
        values |= _choose_profile(values["model"], selected)
    edits = write_values(selected, all_hosts, values, dry=options.dry, label=f"use {choice}")
    return edits, sorted(host.name for host in selected)


def _choose_profile(model: str, hosts: list[Target]) -> dict[str, str]:
    """Return the best profile if a current profile does not fit or is another model's `plain`."""
    counts = (hosts[0].settings.ranks, *HOST_COUNTS)
    by_count = (find_fitting_profiles(model, hosts[0].catalog, count) for count in counts)
    fitting = next(filter(None, by_count), [])
    current = {(host.settings.model, host.settings.profile) for host in hosts}
    profiles = sorted({profile for _, profile in current})
    is_unfit = any(
        profile not in fitting or (profile == PLAIN_PROFILE and current_model != model)
        for current_model, profile in current
    )
    if fitting and is_unfit:
        note(f"{'kept' if profiles == fitting[:1] else 'chose'} profile {fitting[0]}")
        return {"profile": fitting[0]}
    note(f"kept profile {', '.join(profiles)}")
    return {}


def _parse_choice(choice: str, catalog: Catalog) -> dict[str, str]:
    """Return settings for MODEL, PROFILE or MODEL/PROFILE; raise for unknown names."""
    models, profiles = sorted(catalog.models), sorted(set(catalog.profile_names))
    model, slash, profile = choice.partition("/")
    if slash and model in models and profile in profiles:
        return {"model": model, "profile": profile}
    for key, known in (("model", models), ("profile", profiles)):
        if not slash and choice in known:
            return {key: choice}
    unknown = profile if slash and model in models else model
    if problems := catalog.problems(f"models/{unknown}", f"profiles/{unknown}"):
        raise SparkError(problems)
    shipped = [name for name in models if not name.startswith("lab-")]
    names = f"models: {', '.join(shipped)}; profiles: {', '.join(profiles)}"
    fix = suggest(unknown, [*shipped, *profiles], f"choose from {names}")
    raise SparkError.single(f"use {choice}", f"the catalog does not contain '{unknown}'", fix)
