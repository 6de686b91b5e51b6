"""``spark-deploy uninstall``: runs exactly the pyinfra line that it prints."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from spark_deploy.checkout import CHECKOUT
from spark_deploy.cli.hosts import default_inventory, listed


def add_options(command: argparse.ArgumentParser) -> None:
    """Declare what this command takes beside hosts."""
    command.add_argument("--dry", action="store_true", help="say what goes and stays, do nothing")
    command.add_argument("-y", "--yes", action="store_true", help="ask nothing")
    command.add_argument("--models", action="store_true", help="remove models, too")
    command.add_argument(
        "--engine", action="store_true", help="remove Docker and CUDA, too, where a deploy put them"
    )


def run(options: argparse.Namespace) -> int:
    """Take this project off the chosen hosts; the exit code is pyinfra's."""
    words = line(options)
    print(shlex.join(words), file=sys.stderr, flush=True)
    pyinfra = Path(sys.executable).with_name("pyinfra")
    return subprocess.run([str(pyinfra), *words[1:]], check=False).returncode


def line(options: argparse.Namespace) -> list[str]:
    """Return the pyinfra line, with every host by its name.

    Raises:
        SparkError: the inventory, or a host that is named, is not there.
    """
    named = options.inventory or options.inventory_option
    inventory = Path(named) if named else default_inventory()
    limits = [word for host in listed(options) for word in ("--limit", host.name)]
    chosen = [(f"uninstall.{key}", getattr(options, key)) for key in ("models", "engine")]
    data = [*options.data, *(f"{key}=true" for key, wanted in chosen if wanted)]
    flags = ["--dry"] if options.dry else ["-y"] if options.yes else []
    return [
        "pyinfra", str(inventory), str(CHECKOUT / "deploys/uninstall.py"), *limits,
        *(word for item in data for word in ("--data", item)), *flags,
    ]  # fmt: skip
