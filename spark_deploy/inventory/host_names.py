"""Host names and their settings; mistakes that pyinfra ignores are errors."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyinfra.api.host import Host

from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.errors import Problem, SettingsError
from spark_deploy.config.schema_errors import closest
from spark_deploy.config.settings.load import HostSettings
from spark_deploy.hosts.certificates import is_address
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.resolve import Request
from spark_deploy.plan.types import HostPlan

LOCAL = "@local"
CONTEXT_KEY = "spark_deploy"  # in pyinfra's data of a host
NOT_LISTED = (
    "is not listed in an inventory file of spark-deploy",
    "run with an inventory file, such as inventory/spark.py; for this machine list '@local'",
)
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_FOLDERS = {"group_vars": "group", "host_vars": "host"}
# Formats of variables in other tools.
_LIKE_SETTINGS = ("", ".yml", ".yaml", ".json", ".toml", ".py")


@dataclass(frozen=True, slots=True)
class HostContext:
    """Settings and catalog of a host, carried to the deploy in pyinfra's data."""

    loaded: HostSettings
    catalog: Catalog
    plans: list[tuple[Request, HostPlan]] = field(default_factory=list, compare=False, repr=False)

    def plan(self, request: Request) -> HostPlan:
        """Plan each request once in a process."""
        for earlier, plan in self.plans:
            if earlier == request:
                return plan
        plan = plan_host(request)
        self.plans.append((request, plan))
        return plan

    def to_json(self) -> dict[str, str]:
        """For ``debug-inventory``."""
        return {"group": self.loaded.group, "folder": str(Path(self.loaded.root))}


def context_of(host: Host) -> HostContext:
    context = host.data.get(CONTEXT_KEY)
    if not isinstance(context, HostContext):
        raise SettingsError.one(host.name, *NOT_LISTED)
    return context


def host_problems(groups: Mapping[str, Any], *, file: str) -> Iterator[Problem]:
    joined = dict(_joined_strings(Path(file)))
    group_of: dict[str, str] = {}
    for group, hosts in groups.items():
        where = f"{Path(file).name}: hosts of {group}"
        if not isinstance(hosts, (list, tuple)):
            yield Problem(where, f"{hosts!r} is not a list", 'write hosts=["spark-1", "spark-2"]')
            continue
        if not hosts:
            yield Problem(where, "the list is empty", "add a host, or remove the group")
        for host in hosts:
            if not isinstance(host, str):
                fix = "write each name as text in quotes; put settings into host_vars"
                yield Problem(where, f"{host!r} is not a name", fix)
                continue
            if host in joined:
                line, message = joined[host]
                yield Problem(f"{where} line {line}", message, "put a comma between them")
            elif wrong := _wrong_name(host):
                yield Problem(f"{where}: {host!r}", *wrong)
            elif group_of.get(host) == group:
                yield Problem(f"{where}: {host}", "is listed twice", "list it once")
            elif host in group_of:
                message = f"is in the groups {group_of[host]} and {group}"
                yield Problem(f"{where}: {host}", message, "list every host in a single group")
            group_of[host] = group


def _wrong_name(host: str) -> tuple[str, str] | None:
    """Return problem and fix; ``None`` if the name is valid."""
    if host.startswith("@"):
        message = "is not a host: of pyinfra's connectors only @local works here"
        return None if host == LOCAL else (message, f"write {LOCAL}")
    user, sign, rest = host.partition("@")
    if sign:
        fix = f"write {rest!r}, and `ssh: {{user: {user}}}` in its host_vars"
        return "contains a login", fix
    if is_address(host):
        return None
    name, _, port = host.rpartition(":")
    if _NAME.fullmatch(name) and port.isdecimal():
        fix = f"write {name!r}, and `ssh: {{port: {port}}}` in its host_vars"
        return "contains a port", fix
    if not _NAME.fullmatch(host) or set(host) <= set("0123456789."):
        return "is not a host name or address", "write a name that ssh knows, such as spark-1"
    return None


def _joined_strings(file: Path) -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield adjacent strings that Python joins because a comma is missing."""
    run: list[tokenize.TokenInfo] = []
    for token in _tokens(file):
        if token.type == tokenize.STRING and not token.string.lower().startswith(("f", "rf", "fr")):
            run.append(token)
        elif token.type not in (tokenize.NL, tokenize.COMMENT):
            parts = [ast.literal_eval(each.string) for each in run]
            if len(parts) > 1 and all(isinstance(part, str) for part in parts):
                names = " and ".join(f'"{part}"' for part in parts)
                yield "".join(parts), (run[0].start[0], f"{names} are joined to a single name")
            run = []


def _tokens(file: Path) -> Iterator[tokenize.TokenInfo]:
    """Stop silently at syntax errors; executing the file gives a better message."""
    if not file.is_file():
        return
    try:
        with tokenize.open(file) as text:
            yield from tokenize.generate_tokens(text.readline)
    except (OSError, SyntaxError, UnicodeDecodeError, tokenize.TokenError):
        return


def stray_files(groups: Mapping[str, Sequence[str]], *, root: Path, file: str) -> Iterator[Problem]:
    """Yield settings files of no group or host, nor of an adjacent inventory."""
    own = {
        "group_vars": {"all", *groups},
        "host_vars": {host.removeprefix("@") for hosts in groups.values() for host in hosts},
    }
    adjacent = _words_of_adjacent_inventories(root, Path(file).resolve())
    for folder, kind in _FOLDERS.items():
        for path in sorted((root / folder).glob("[!._]*")):
            known = path.name in own[folder] or path.stem in own[folder]
            if path.suffix == ".yml" and path.is_file() and (known or path.stem in adjacent):
                continue
            if path.suffix not in _LIKE_SETTINGS and not known:
                continue
            where = f"{folder}/{path.name}"
            if path.suffix != ".yml" or path.is_dir():
                stem = path.name if path.name in own[folder] else path.stem
                fix = f"write a single file {folder}/{stem}.yml"
                yield Problem(where, "is not read: settings files end in .yml", fix)
                continue
            guess = closest(path.stem, sorted(own[folder]))
            fix = f"did you mean {folder}/{guess}.yml?" if guess else "rename or remove it"
            yield Problem(where, f"does not belong to a {kind} of {Path(file).name}", fix)


def _words_of_adjacent_inventories(root: Path, file: Path) -> set[str]:
    folders = {root, root / "inventory", root / "inventories", file.parent}
    return {
        token.string.strip("\"'").removeprefix("@")
        for path in {path for folder in folders for path in folder.glob("*.py")} - {file}
        for token in _tokens(path)
        if token.type in (tokenize.STRING, tokenize.NAME)
    }
