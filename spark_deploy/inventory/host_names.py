"""Check host names and settings files, because pyinfra ignores mistakes in them."""

import ast
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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
    "is not listed in an inventory file for spark-deploy",
    "run with an inventory file, such as inventory/spark.py; for this machine, list '@local'",
)
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_FOLDERS = {"group_vars": "group", "host_vars": "host"}
# Suffixes of variable files in other tools.
_SUFFIXES = ("", ".yml", ".yaml", ".json", ".toml", ".py")


@dataclass(frozen=True, slots=True)
class HostContext:
    """Settings and catalog of a host, passed to the deploy in pyinfra's data."""

    loaded: HostSettings
    catalog: Catalog
    plans: list[tuple[Request, HostPlan]] = field(default_factory=list, compare=False, repr=False)

    def plan(self, request: Request) -> HostPlan:
        for earlier, plan in self.plans:
            if earlier == request:
                return plan
        plan = plan_host(request)
        self.plans.append((request, plan))
        return plan

    def to_json(self) -> dict[str, str]:
        """Return what pyinfra's ``debug-inventory`` prints."""
        return {"group": self.loaded.group, "folder": str(Path(self.loaded.root))}


def context_of(host: Host) -> HostContext:
    context = host.data.get(CONTEXT_KEY)
    if not isinstance(context, HostContext):
        raise SettingsError.single(host.name, *NOT_LISTED)
    return context


def host_problems(groups: Mapping[str, Any], *, file: str) -> Iterator[Problem]:
    """Yield invalid, repeated and accidentally joined names in the groups of an inventory file."""
    joined = {literals.name: literals for literals in _joined_strings(Path(file))}
    group_by_host: dict[str, str] = {}
    for group, hosts in groups.items():
        where = f"{Path(file).name}: hosts of {group}"
        if not isinstance(hosts, (list, tuple)):
            fix = 'write hosts=["spark-1", "spark-2"]'
            yield Problem(where, f"expected a list, got {hosts!r}", fix)
            continue
        if not hosts:
            yield Problem(where, "the list is empty", "add a host, or remove the group")
        for host in hosts:
            if not isinstance(host, str):
                fix = "write each name in quotes, and put settings into host_vars"
                yield Problem(where, f"expected a name, got {host!r}", fix)
                continue
            if host in joined:
                where_joined = f"{where} line {joined[host].line}"
                yield Problem(where_joined, joined[host].message, "put a comma between them")
            elif problem := _name_problem(f"{where}: {host!r}", host):
                yield problem
            elif group_by_host.get(host) == group:
                yield Problem(f"{where}: {host}", "is listed twice", "list it once")
            elif host in group_by_host:
                message = f"is in the groups {group_by_host[host]} and {group}"
                yield Problem(f"{where}: {host}", message, "list each host in only one group")
            group_by_host[host] = group
    yield from _ambiguous_names(group_by_host, file)


def _ambiguous_names(group_by_host: Mapping[str, str], file: str) -> Iterator[Problem]:
    """Yield hosts whose name, in a command, would select a whole group."""
    for host in group_by_host:
        of_all = host in ("all", Path(file).stem)
        selected = (name for name, group in group_by_host.items() if of_all or group == host)
        if others := [name for name in selected if name != host]:
            message = f"would also select {', '.join(others)}, because a group has this name"
            yield Problem(f"{Path(file).name}: {host}", message, "rename the host")


def _name_problem(where: str, host: str) -> Problem | None:
    if host.startswith("@"):
        if host == LOCAL:
            return None
        message = "unsupported pyinfra connector; only @local is supported"
        return Problem(where, message, f"write {LOCAL}, or the name of a host")
    user, at, name = host.partition("@")
    if at:
        fix = f"use {name!r} as the host name, and set `ssh: {{user: {user}}}` in its host_vars"
        return Problem(where, "contains a login", fix)
    if is_address(host):
        return None
    name, _, port = host.rpartition(":")
    if _NAME.fullmatch(name) and port.isdecimal():
        fix = f"use {name!r} as the host name, and set `ssh: {{port: {port}}}` in its host_vars"
        return Problem(where, "contains a port", fix)
    if not _NAME.fullmatch(host) or set(host) <= set("0123456789."):
        fix = "use a name that ssh can resolve, such as spark-1"
        return Problem(where, "invalid host name or address", fix)
    return None


class _JoinedStrings(NamedTuple):
    name: str
    line: int
    message: str


def _joined_strings(file: Path) -> Iterator[_JoinedStrings]:
    """Yield adjacent string literals, which Python joins because the comma between is missing."""
    adjacent: list[tokenize.TokenInfo] = []
    for token in _tokens(file):
        if token.type == tokenize.STRING and not token.string.lower().startswith(("f", "rf", "fr")):
            adjacent.append(token)
        elif token.type not in (tokenize.NL, tokenize.COMMENT):
            parts = [ast.literal_eval(string.string) for string in adjacent]
            if len(parts) > 1 and all(isinstance(part, str) for part in parts):
                names = " and ".join(f'"{part}"' for part in parts)
                message = f"{names} are joined into a single name"
                line, _ = adjacent[0].start
                yield _JoinedStrings("".join(parts), line, message)
            adjacent = []


def _tokens(file: Path) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens before the first syntax error, which pyinfra itself reports."""
    if not file.is_file():
        return
    try:
        with tokenize.open(file) as source:
            yield from tokenize.generate_tokens(source.readline)
    except (OSError, SyntaxError, UnicodeDecodeError, tokenize.TokenError):
        return


def stray_file_problems(
    groups: Mapping[str, Sequence[str]], *, root: Path, file: str
) -> Iterator[Problem]:
    """Report settings files that match no group or host."""
    names = {
        "group_vars": {"all", *groups},
        "host_vars": {host.removeprefix("@") for hosts in groups.values() for host in hosts},
    }
    adjacent_names = _names_in_adjacent_inventories(root, Path(file).resolve())
    for folder, kind in _FOLDERS.items():
        known_names = names[folder]
        for path in sorted((root / folder).glob("[!._]*")):
            is_known = path.name in known_names or path.stem in known_names
            is_settings_file = path.suffix == ".yml" and path.is_file()
            if is_settings_file and (is_known or path.stem in adjacent_names):
                continue
            where = f"{folder}/{path.name}"
            if is_settings_file:
                guess = closest(path.stem, sorted(known_names))
                fix = f"did you mean {folder}/{guess}.yml?" if guess else "rename or remove it"
                yield Problem(where, f"matches no {kind} in {Path(file).name}", fix)
            elif path.suffix in _SUFFIXES or is_known:
                name = path.name if path.name in known_names else path.stem
                fix = f"write a single file {folder}/{name}.yml"
                yield Problem(where, "is ignored, because settings files end in .yml", fix)


def _names_in_adjacent_inventories(root: Path, file: Path) -> set[str]:
    folders = {root, root / "inventory", root / "inventories", file.parent}
    others = {path for folder in folders for path in folder.glob("*.py")} - {file}
    return {
        token.string.strip("\"'").removeprefix("@")
        for path in others
        for token in _tokens(path)
        if token.type in (tokenize.STRING, tokenize.NAME)
    }
