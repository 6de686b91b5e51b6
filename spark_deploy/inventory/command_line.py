"""The command line of this run: of pyinfra, or of ``spark-deploy``, which is made like it."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from spark_deploy.config.errors import Problem, SettingsError
from spark_deploy.config.schema_errors import closest

# Deploys that make no plan: what hosts are to serve need not be possible for them.
_PLAN_NOTHING = {"rollback.py", "rotate_key.py", "unbootstrap.py", "uninstall.py"}


def plans(deploy: str) -> bool:
    """Whether a deploy, by its file, makes hosts serve what the settings choose."""
    place = Path(deploy)
    return place.parent.name != "deploys" or place.name not in _PLAN_NOTHING


def judges(arguments: Mapping[str, Any]) -> bool:
    """Whether choices that cannot be served are refused: where a plan may be made of them."""
    operations: Sequence[str] = arguments.get("operations") or []
    return bool(arguments.get("judged", plans(operations[0] if operations else "")))


def command_line() -> dict[str, Any]:
    """Return the command line of pyinfra or of `spark-deploy`; empty when used from elsewhere."""
    context = click.get_current_context(silent=True)
    if context is None or "inventory" not in context.params:
        return {}
    return dict(context.params)


def overrides(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among ``--data``; the rest is pyinfra's own."""
    pairs = [item.partition("=") for item in arguments.get("data") or ()]
    bad = [f"{key}{sign}{value}" for key, sign, value in pairs if not sign]
    if bad:
        raise SettingsError.one(f"--data {bad[0]}", "has no value", "write --data key=value")
    of_pyinfra = ("_", "ssh_")  # such as `_sudo` and `ssh_user`
    return {key: _value(text) for key, _, text in pairs if not key.startswith(of_pyinfra)}


def _value(text: str) -> Any:
    """Read a value of ``--data`` by the rules of pyinfra: true, false, number, JSON, else text."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for read in (int, json.loads):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def check_patterns(
    arguments: Mapping[str, Any], groups: Mapping[str, Sequence[str]], stem: str
) -> None:
    """Refuse patterns that match nothing: pyinfra would do nothing and exit 0."""
    names = [host for hosts in groups.values() for host in hosts]
    known = [*groups, *names]
    problems = []
    for option in ("limit", "exclude"):
        for pattern in arguments.get(option) or ():
            if pattern in {"all", stem, *groups} or fnmatch.filter(names, pattern):
                continue
            guess = closest(pattern, known)
            fix = f"did you mean {guess}?" if guess else f"known: {', '.join(known)}"
            problems.append(Problem(f"--{option} {pattern}", "matches no host or group", fix))
    if arguments.get("no_wait"):
        problems.append(Problem("--no-wait", "would hide failures", "leave it out"))
    if problems:
        raise SettingsError(problems)


def named_inventory() -> str:
    """Return the inventory that the command line names.

    Raises:
        SettingsError: it looks like a file, and is none.
    """
    named = str(command_line().get("inventory") or "")
    if not named or Path(named).exists() or "," in named or "@" in named:
        return named
    looks_like_file = "/" in named or named.endswith(".py")
    if looks_like_file or not (_is_host(named) or _is_module(named)):
        raise no_inventory(named)
    return named


def no_inventory(named: str) -> SettingsError:
    """Return the error about a path where no inventory file is; it names the closest one."""
    path = Path(named)
    folders = dict.fromkeys((path.parent, path.parent / "inventory", Path("inventory")))
    there = sorted({str(one) for folder in folders for one in folder.glob("[!_]*.py")})
    same = [one for one in there if Path(one).name == path.name]  # of another folder
    guess = same[0] if same else closest(named, there)
    fix = (
        f"did you mean {guess}?" if guess else "name an inventory file, such as inventory/spark.py"
    )
    return SettingsError.one(named, "is not an inventory file", fix)


def _is_host(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


def _is_module(name: str) -> bool:
    """Whether pyinfra may find hosts in a module, named as ``module.attribute``."""
    try:
        return importlib.util.find_spec(name.replace(":", ".").partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
