"""Names that an inventory and its folders hold: mistakes that would otherwise go unnoticed.

A host that is none, two names that a missing comma joined, a file of settings that nobody reads:
pyinfra would take the first for a name and pass over the others.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spark_deploy.documents.schema_check import closest
from spark_deploy.errors import Problem
from spark_deploy.payload.certificates import is_address

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
