"""``spark-deploy uninstall``: runs exactly the pyinfra line that it prints."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from spark_deploy.checkout import CHECKOUT
from spark_deploy.cli.commands import Options
from spark_deploy.cli.hosts import inventory_of, listed


def run(options: Options) -> int:
    """Take this project off the chosen hosts; the exit code is pyinfra's."""
    words = line(options)
    print(shlex.join(words), file=sys.stderr, flush=True)
    pyinfra = Path(sys.executable).with_name("pyinfra")
    return subprocess.run([str(pyinfra), *words[1:]], check=False).returncode


def line(options: Options) -> list[str]:
    """Return the pyinfra line, with every host by its name.

    Raises:
        SparkError: the inventory, or a host that is named, is not there.
    """
    limits = [word for host in listed(options) for word in ("--limit", host.name)]
    chosen = [(f"uninstall.{key}", getattr(options, key)) for key in ("models", "engine")]
    data = [*options.data, *(f"{key}=true" for key, wanted in chosen if wanted)]
    flags = ["--dry"] if options.dry else ["-y"] if options.yes else []
    return [
        "pyinfra", str(inventory_of(options)), str(CHECKOUT / "deploys/uninstall.py"), *limits,
        *(word for item in data for word in ("--data", item)), *flags,
    ]  # fmt: skip
