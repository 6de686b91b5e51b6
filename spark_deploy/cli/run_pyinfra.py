"""The pyinfra line behind a command: printed, run as printed, and shown as ``up`` shows it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from pyinfra.api.host import Host
from rich.console import Console
from spark_contract.errors import Problem
from spark_contract.release import service_of
from spark_contract.status import Rollback
from spark_contract.units import MAIN_SERVICE

from spark_deploy.cli.hosts import Listed, inventory_of, listed, program, say, typed
from spark_deploy.cli.options import Options
from spark_deploy.cli.progress_screen import watch
from spark_deploy.cli.query_hosts import Answer, look
from spark_deploy.cli.reach import reach
from spark_deploy.cli.terminal import tell_problem
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SettingsError, SparkError
from spark_deploy.hosts.status import WayBack
from spark_deploy.inventory.command_line import plans


def ended(hosts: Sequence[Listed], to: str | None) -> int | None:
    """Say of each host from where to where it goes; an exit code where there is nothing to do."""
    service = service_of(to) if to else MAIN_SERVICE
    codes = list[int]()

    def ask(host: Host, _: Listed) -> Rollback | Problem:
        found: Rollback | Problem = host.get_fact(WayBack, service=service, to=to)
        return found

    answers: list[Answer[Rollback | Problem]] = look(hosts, ask)
    for one in answers:
        way = one.value
        if way is None or isinstance(way, Problem):
            say(f"{one.host.name}: {way or one.problem}")
            codes.append(1)
        elif way.done or way.to is None:
            say(f"{one.host.name}: {way.done or 'nothing to go back to'}")
            codes.append(0)
        else:
            say(f"{one.host.name}: goes back from {way.came or 'nothing'} to {way.to}")
    return max(codes) if len(codes) == len(hosts) else None


# Deploys by command, and the settings that options of the command stand for.
DEPLOYS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "up": ("deploy.py", {}),
    "bootstrap": ("deploys/bootstrap.py", {}),
    "fabric": (
        "deploys/fabric.py", {"restore": "fabric.restore", "measure": "fabric.measure"},
    ),
    "rollback": ("deploys/rollback.py", {"to": "releases.rollback_to"}),
    "prune": ("deploys/prune.py", {}),
    "requantize": ("deploys/requantize.py", {"requantized": "checkpoint.requantized"}),
    "rotate-key": ("deploys/rotate_key.py", {}),
    "unbootstrap": ("deploys/unbootstrap.py", {}),
    "uninstall": (
        "deploys/uninstall.py", {"models": "uninstall.models", "engine": "uninstall.engine"},
    ),
}  # fmt: skip


_INTERRUPTED = 130

# What a person agrees to.
_QUESTIONS = {
    "fabric": "Change the network of the ports between them? (--dry shows the file)",
    "measure": "Send up to 1 GB over each port to the next host, while they serve?",
    "rollback": "Go back to the release that served before?",
    "prune": "Remove what no kept release needs? (--dry shows each thing)",
    "requantize": "Quantise there, for hours, with all of the host's memory?",
    "rotate-key": "Make a new API key, and refuse the old one at once?",
    "uninstall": "Take this project off? (--dry shows what goes and what stays)",
    "access": "Uninstall, then revoke this machine's access? (--dry shows both)",
}


def run(options: Options) -> int:
    """Run the deploy of a command on the chosen hosts; the exit code is pyinfra's.

    Raises:
        SparkError: the inventory, or a host that is named, is not there; or nobody can agree.
    """
    code = _run(options)
    if options.command == "uninstall" and options.access and code == 0:
        # Last: the controller cannot log in afterwards. One confirmation covers both deploys.
        revoke = {"command": "unbootstrap", "yes": not options.dry}
        return _run(Options(**{**vars(options), **revoke}))
    return code


def _run(options: Options) -> int:
    deploy = DEPLOYS[options.command][0]
    # What options stand for is judged here, too: a mistake in it is no failed run.
    told = Options(**{**vars(options), "data": [*options.data, *_chosen(options.command, options)]})
    typed = {f"--data: {key}": f"--{name}" for name, key in DEPLOYS[options.command][1].items()}
    try:
        chosen = listed(told, judged=plans(deploy))
    except SettingsError as error:
        raise SettingsError(
            [replace(one, where=typed.get(one.where, one.where)) for one in error.problems]
        ) from error
    hosts = [host.name for host in chosen]
    asks = not options.yes and not options.dry and sys.stdin.isatty()
    if options.command == "rollback" and asks:
        code = ended(chosen, options.to)
        if code is not None:
            return code
    if not options.dry:
        asked = options.command
        for name in ("measure", "access"):
            asked = name if getattr(options, name, False) else asked
        agreed(options, f"{', '.join(hosts)}: {_QUESTIONS.get(asked, asked)}")
    flags = ["--dry" if options.dry else "-y", *["--json"] * options.json]
    words = line(options.command, options, hosts, flags)
    show(words)
    if options.dry or options.json:
        code = subprocess.run(argv(words), check=False).returncode
    else:
        code = watched(words, hosts, options)
    if code not in (0, _INTERRUPTED):
        # pyinfra says no more of hosts that it did not reach than that none is left.
        for problem in reach(chosen).problems():
            tell_problem(problem)
    return code


def agreed(options: Options, question: str) -> None:
    """Ask once, unless ``--yes`` answered already.

    Raises:
        SparkError: nobody is there to be asked.
    """
    if options.yes:
        return
    if not sys.stdin.isatty():
        fix = "run it in a terminal, or with -y"
        raise SparkError.one(options.command, "asks before it changes hosts, and nobody is there",
                             fix)  # fmt: skip
    click.confirm(question, abort=True, err=True)


def watched(words: Sequence[str], hosts: Sequence[str], options: Options) -> int:
    """Run a line and show how it goes, with ``--verbose`` in pyinfra's own words."""
    if options.verbose:
        return subprocess.run(argv(words), check=False).returncode
    console = Console(stderr=options.json, highlight=False)
    return watch(argv(words), hosts, _log_folder() / f"{options.command}.log", console)


def _log_folder() -> Path:
    """Return where pyinfra's own words are kept; a home that cannot be written stops no deploy."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "spark-deploy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="spark-deploy-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="spark-deploy-"))


def line(
    deploy: str, options: Options, hosts: Iterable[str], flags: Sequence[str] = ()
) -> list[str]:
    """Return the words of the pyinfra line, with every host by its name."""
    pair = {key: getattr(options, key) for key in ("model", "profile")}
    data = [*options.data, *(_said(key, value) for key, value in pair.items() if value)]
    data += _chosen(deploy, options)
    return [
        "pyinfra", str(inventory_of(options)), str(CHECKOUT / DEPLOYS[deploy][0]),
        *(word for host in hosts for word in ("--limit", host)),
        *(word for item in data for word in ("--data", item)), *flags,
    ]  # fmt: skip


def _chosen(deploy: str, options: Options) -> list[str]:
    """Return the settings that options of a command stand for."""
    chosen = {key: getattr(options, name) for name, key in DEPLOYS[deploy][1].items()}
    return [_said(key, value) for key, value in chosen.items() if value]


def _said(key: str, value: Any) -> str:
    return f"{key}={'true' if value is True else value}"


def show(words: Sequence[str]) -> None:
    """Print the line as a person would type it."""
    print(shlex.join([typed(words[0]), *words[1:]]), file=sys.stderr, flush=True)


def argv(words: Sequence[str]) -> list[str]:
    """Return what is run: the pyinfra of this environment."""
    return [str(program(words[0])), *words[1:]]
