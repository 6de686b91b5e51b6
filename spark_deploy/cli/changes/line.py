"""The pyinfra line behind a command: printed, and run as printed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spark_deploy.checkout import CHECKOUT
from spark_deploy.cli.commands import Options
from spark_deploy.cli.hosts import inventory_of, listed

# Deploys by command, and the settings that options of the command stand for.
DEPLOYS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "up": ("deploy.py", {}),
    "bootstrap": ("deploys/bootstrap.py", {}),
    "rollback": ("deploys/rollback.py", {"to": "releases.rollback_to"}),
    "prune": ("deploys/prune.py", {}),
    "rotate-key": ("deploys/rotate_key.py", {}),
    "unbootstrap": ("deploys/unbootstrap.py", {}),
    "uninstall": (
        "deploys/uninstall.py", {"models": "uninstall.models", "engine": "uninstall.engine"},
    ),
}  # fmt: skip


def run(options: Options) -> int:
    """Run the deploy of a command on the chosen hosts; the exit code is pyinfra's.

    Raises:
        SparkError: the inventory, or a host that is named, is not there.
    """
    hosts = [host.name for host in listed(options)]
    flags = ["--dry"] if options.dry else ["-y"] if options.yes else []
    flags += ["--json"] if options.json else []
    words = line(options.command, options, hosts, flags)
    show(words)
    return subprocess.run(argv(words), check=False).returncode


def line(
    deploy: str, options: Options, hosts: Iterable[str], flags: Sequence[str] = ()
) -> list[str]:
    """Return the words of the pyinfra line, with every host by its name."""
    file, settings = DEPLOYS[deploy]
    chosen = {key: getattr(options, name) for name, key in settings.items()}
    pair = {key: getattr(options, key) for key in ("model", "profile")}
    data = [*options.data, *(_said(key, value) for key, value in (pair | chosen).items() if value)]
    return [
        "pyinfra", str(inventory_of(options)), str(CHECKOUT / file),
        *(word for host in hosts for word in ("--limit", host)),
        *(word for item in data for word in ("--data", item)), *flags,
    ]  # fmt: skip


def _said(key: str, value: Any) -> str:
    return f"{key}={'true' if value is True else value}"


def show(words: Sequence[str]) -> None:
    """Print the line as a person would type it."""
    print(shlex.join(_typed(words)), file=sys.stderr, flush=True)


def argv(words: Sequence[str]) -> list[str]:
    """Return what is run: the pyinfra of this environment."""
    return [str(_pyinfra()), *words[1:]]


def _pyinfra() -> Path:
    return Path(sys.executable).with_name("pyinfra")


def _typed(words: Sequence[str]) -> list[str]:
    """Return the words, with pyinfra's whole path where the shell would find another or none."""
    found = shutil.which("pyinfra")
    same = found is not None and os.path.realpath(found) == os.path.realpath(_pyinfra())
    return [words[0] if same else str(_pyinfra()), *words[1:]]
