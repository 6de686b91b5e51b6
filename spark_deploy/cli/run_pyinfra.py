"""Commands that run a deploy: print the equivalent pyinfra line, run and show it here."""

from __future__ import annotations

import functools
import os
import shlex
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

from spark_deploy.cli.hosts import Target, inventory_path, select_hosts
from spark_deploy.cli.options import Options, shared_options
from spark_deploy.cli.progress_screen import INTERRUPTED, watch
from spark_deploy.cli.query_hosts import Answer, check_access, query
from spark_deploy.cli.terminal import command_path, note, print_problem
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SettingsError, SparkError
from spark_deploy.hosts.status import WayBack
from spark_deploy.inventory.command_line import plans
from spark_deploy.inventory.run import run_deploy


def ended(hosts: Sequence[Target], to: str | None) -> int | None:
    """Say of each host from where to where it goes; an exit code where there is nothing to do."""
    service = service_of(to) if to else MAIN_SERVICE
    codes = list[int]()

    def ask(host: Host, _: Target) -> Rollback | Problem:
        found: Rollback | Problem = host.get_fact(WayBack, service=service, to=to)
        return found

    answers: list[Answer[Rollback | Problem]] = query(hosts, ask)
    for one in answers:
        way = one.value
        if way is None or isinstance(way, Problem):
            note(f"{one.host.name}: {way or one.problem}")
            codes.append(1)
        elif way.done or way.to is None:
            note(f"{one.host.name}: {way.done or 'nothing to go back to'}")
            codes.append(0)
        else:
            note(f"{one.host.name}: goes back from {way.came or 'nothing'} to {way.to}")
    return max(codes) if len(codes) == len(hosts) else None


@click.command
@click.option("--to", metavar="RELEASE", help="Return to this release instead.")
@shared_options(changes=True)
def rollback(options: Options, to: str | None) -> int:
    """Return to an earlier release; without a change exit early."""
    if not options.yes and not options.dry and sys.stdin.isatty():
        code = ended(select_hosts(options, judged=False), to)
        if code is not None:
            return code
    return run("rollback", options, {"releases.rollback_to": to})


@click.command
@shared_options(plans=True, changes=True)
def prune(options: Options) -> int:
    """Remove files and images that no kept release needs."""
    return run("prune", options)


@click.command("rotate-key")
@shared_options(changes=True)
def rotate_key(options: Options) -> int:
    """Replace the API key."""
    return run("rotate-key", options)


@click.command
@click.option("--models", is_flag=True, help="Also remove models.")
@click.option("--engine", is_flag=True, help="Also remove Docker and CUDA that a deploy installed.")
@click.option("--access", is_flag=True, help="Finally revoke SSH key, sudo rule and account.")
@shared_options(changes=True)
def uninstall(options: Options, models: bool, engine: bool, access: bool) -> int:
    """Remove what deploys installed."""
    data = {"uninstall.models": models, "uninstall.engine": engine}
    code = run("uninstall", options, data, question="access" if access else "uninstall")
    if access and code == 0:
        # Last: the controller cannot log in afterwards. One confirmation covers both deploys.
        return run("unbootstrap", replace(options, yes=not options.dry))
    return code


@click.command
@click.option("--restore", is_flag=True, help="Restore the previous network.")
@click.option("--measure", is_flag=True, help="Measure each link; change nothing.")
@shared_options(changes=True)
def fabric(options: Options, restore: bool, measure: bool) -> int:
    """Configure or measure the links between hosts."""
    data = {"fabric.restore": restore, "fabric.measure": measure}
    return run("fabric", options, data, question="measure" if measure else "fabric")


_QUESTIONS = {
    "fabric": "Change the network of the ports between them? (--dry shows the file)",
    "measure": "Send up to 1 GB over each port to the next host, while they serve?",
    "rollback": "Return to the previous release?",
    "prune": "Remove what no kept release needs? (--dry lists each item)",
    "requantize": "Quantize there, for hours, with all of the host's memory?",
    "rotate-key": "Create a new API key and reject the old one at once?",
    "uninstall": "Uninstall? (--dry lists what is removed and what stays)",
    "access": "Uninstall, then revoke this machine's access? (--dry lists both)",
}


def run(
    command: str, options: Options, data: Mapping[str, Any] | None = None, *, question: str = ""
) -> int:
    """Run the deploy of a command on the chosen hosts; returns pyinfra's exit code.

    ``data`` has the settings that options of the command stand for, ``question`` is a key of
    ``_QUESTIONS`` if it is not the command.

    Raises:
        SparkError: the inventory or a named host is missing, or a confirmation needs a terminal.
    """
    chosen = {key: value for key, value in (data or {}).items() if value}
    more = [_said(key, value) for key, value in chosen.items()]
    typed = {"--data: releases.rollback_to": "--to"}
    try:
        hosts = select_hosts(
            replace(options, data=[*options.data, *more]), judged=plans(deploy_file(command))
        )
    except SettingsError as error:
        raise SettingsError(
            [replace(one, where=typed.get(one.where, one.where)) for one in error.problems]
        ) from error
    names = [host.name for host in hosts]
    if not options.dry:
        asked = _QUESTIONS.get(question or command, command)
        agreed(options.yes, f"{', '.join(names)}: {asked}")
    flags = ["--dry" if options.dry else "-y", *["--json"] * options.json]
    show(line(command, options, names, flags, more))
    options = replace(options, data=[*options.data, *more])
    code = deploy(command, hosts, options, as_json=options.json)
    if code not in (0, INTERRUPTED):
        for problem in check_access(hosts).problems():
            print_problem(problem)
    return code


def agreed(is_agreed: bool, question: str) -> None:
    """Ask for confirmation unless ``--yes`` gave it.

    Raises:
        SparkError: there is no terminal.
    """
    if is_agreed:
        return
    if not sys.stdin.isatty():
        raise SparkError.one("confirmation", "needs a terminal", "run it in a terminal, or with -y")
    click.confirm(question, abort=True, err=True)


def deploy(
    command: str, hosts: Sequence[Target], options: Options, *, as_json: bool = False
) -> int:
    """Run the deploy of a command in this process and show it; returns pyinfra's exit code."""
    run = functools.partial(
        run_deploy,
        CHECKOUT / deploy_file(command),
        [(host.name, host.data) for host in hosts],
        options.data,
    )
    if options.verbose or options.dry or as_json:
        return run(dry=options.dry, as_json=as_json)
    console = Console(stderr=options.json, highlight=False)
    return watch(
        lambda watcher: run(watcher=watcher, tell=watcher.tell),
        [host.name for host in hosts], _log_folder() / f"{command}.log", console,
    )  # fmt: skip


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
    command: str,
    options: Options,
    hosts: Iterable[str],
    flags: Sequence[str] = (),
    data: Sequence[str] = (),
) -> list[str]:
    """Return the words of the pyinfra line, with every host by its name."""
    pair = {key: getattr(options, key) for key in ("model", "profile")}
    data = [*options.data, *(_said(key, value) for key, value in pair.items() if value), *data]
    return [
        "pyinfra", str(inventory_path(options)), str(CHECKOUT / deploy_file(command)),
        *(word for host in hosts for word in ("--limit", host)),
        *(word for item in data for word in ("--data", item)), *flags,
    ]  # fmt: skip


def deploy_file(command: str) -> str:
    """Return the deploy that a command runs."""
    return "deploy.py" if command == "up" else f"deploys/{command.replace('-', '_')}.py"


def _said(key: str, value: Any) -> str:
    return f"{key}={'true' if value is True else value}"


def show(words: Sequence[str]) -> None:
    """Print the line as a person would type it."""
    print(shlex.join([command_path(words[0]), *words[1:]]), file=sys.stderr, flush=True)
