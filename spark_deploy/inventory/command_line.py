"""Read the command line of pyinfra or ``spark-deploy``."""

import fnmatch
import importlib.util
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from spark_deploy.config.errors import Problem, SettingsError
from spark_deploy.config.schema_errors import suggest

_WITHOUT_PLAN = {"key.py", "rollback.py", "rotate_key.py", "unbootstrap.py", "uninstall.py"}


def makes_plan(deploy: str) -> bool:
    path = Path(deploy)
    return path.parent.name != "deploys" or path.name not in _WITHOUT_PLAN


def requires_valid_models(arguments: Mapping[str, Any]) -> bool:
    """Return whether invalid models and profiles are errors, as in deploys that make a plan."""
    operations: Sequence[str] = arguments.get("operations") or []
    deploy_file = operations[0] if operations else ""
    return bool(arguments.get("must_serve", makes_plan(deploy_file)))


def command_line() -> dict[str, Any]:
    context = click.get_current_context(silent=True)
    if context is None or "inventory" not in context.params:
        return {}
    return dict(context.params)


def parse_overrides(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings in ``--data``, without pyinfra's."""
    settings = {}
    for item in arguments.get("data") or ():
        key, equals, text = item.partition("=")
        if not equals:
            raise SettingsError.single(f"--data {key}", "has no value", "write `--data key=value`")
        if not key.startswith(("_", "ssh_")):
            settings[key] = _parse_value(text)
    return settings


def login_user(arguments: Mapping[str, Any]) -> str | None:
    data = dict(item.partition("=")[::2] for item in arguments.get("data") or ())
    return arguments.get("ssh_user") or data.get("ssh_user")


def _parse_value(text: str) -> Any:
    """Parse a value as pyinfra does: true, false, a number, JSON, or otherwise a string."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for parse in (int, json.loads):
        try:
            return parse(text)
        except ValueError:
            continue
    return text


def check_patterns(
    arguments: Mapping[str, Any], groups: Mapping[str, Sequence[str]], stem: str
) -> None:
    """Check --limit, --exclude and --no-wait; the inventory file's ``stem`` selects all hosts."""
    names = [host for hosts in groups.values() for host in hosts]
    valid_names = [*groups, *names]
    problems = []
    for option in ("limit", "exclude"):
        for pattern in arguments.get(option) or ():
            if pattern in {"all", stem, *groups} or fnmatch.filter(names, pattern):
                continue
            fix = suggest(pattern, valid_names, f"choose from: {', '.join(valid_names)}")
            problems.append(Problem(f"--{option} {pattern}", "matches no host or group", fix))
    if arguments.get("no_wait"):
        problems.append(Problem("--no-wait", "would hide failures", "remove the option"))
    if problems:
        raise SettingsError(problems)


def inventory_argument() -> str:
    """Return the inventory argument of the command. Raises SettingsError if its file is missing."""
    inventory = str(command_line().get("inventory") or "")
    if not inventory or Path(inventory).exists() or "," in inventory or "@" in inventory:
        return inventory
    looks_like_file = "/" in inventory or inventory.endswith(".py")
    if looks_like_file or not (_is_host(inventory) or _is_module(inventory)):
        raise missing_inventory(inventory)
    return inventory


def missing_inventory(path: str) -> SettingsError:
    missing = Path(path)
    folders = dict.fromkeys((missing.parent, missing.parent / "inventory", Path("inventory")))
    existing = sorted({file for folder in folders for file in folder.glob("[!_]*.py")})
    same_name = [str(file) for file in existing if file.name == missing.name]
    files = same_name[:1] or [str(file) for file in existing]
    fix = suggest(path, files, "pass the path of an inventory file, such as inventory/spark.py")
    return SettingsError.single(path, "is not an inventory file", fix)


def _is_host(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


def _is_module(name: str) -> bool:
    """Return whether pyinfra could read the name as ``module.attribute``."""
    try:
        return importlib.util.find_spec(name.replace(":", ".").partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
