"""Commands that change hosts: by a deploy, printed as a pyinfra command, or by the host tools."""

from __future__ import annotations

import functools
import getpass
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click
from pyinfra.api.host import Host
from rich.console import Console
from spark_contract import tool
from spark_contract.errors import Problem
from spark_contract.release import service_of
from spark_contract.status import Rollback
from spark_contract.units import MAIN_SERVICE

from spark_deploy.cli.console import (
    Options,
    command_path,
    next_command,
    note,
    print_problem,
    print_result,
    service_option,
    shared_options,
)
from spark_deploy.cli.hosts import (
    Answer,
    Target,
    check_access,
    chosen_services,
    inventory_path,
    query,
    select_hosts,
)
from spark_deploy.cli.progress_screen import INTERRUPTED, watch
from spark_deploy.config.checkout import CHECKOUT, cache_folder
from spark_deploy.config.errors import SettingsError, SparkError
from spark_deploy.hosts.commands import shell
from spark_deploy.hosts.status import RollbackPreview
from spark_deploy.inventory.command_line import makes_plan
from spark_deploy.inventory.run import run_deploy

_UNITS_S = {"m": 60, "h": 3600, "d": 86400}


@click.command
@service_option("Only this service.")
@click.option("--for", "period", metavar="PERIOD", help="Start again after 30m, 1h or 2d.")
@shared_options()
def stop(options: Options, service: str | None, period: str | None) -> int:
    """Exit with 1 if a host did not stop."""
    words = [tool.STOP_SERVICE, "--by", f"{getpass.getuser()}@{socket.gethostname()}"]
    if period is not None:
        number, unit = period[:-1], period[-1:]
        if not number.isdecimal() or not int(number) or unit not in _UNITS_S:
            fix = "write a number and m, h or d: --for 90m"
            raise SparkError.one("--for", f"{period!r} is not a period", fix)
        words += ["--for", str(int(number) * _UNITS_S[unit])]
    return _run_tool(options, "stop", words, service)


@click.command
@service_option("Only this service.")
@shared_options()
def start(options: Options, service: str | None) -> int:
    """Exit with 1 if a host did not start the last proven release."""
    return _run_tool(options, "start", [tool.START_SERVICE], service)


def _run_tool(options: Options, command: str, words: list[str], service: str | None) -> int:
    hosts = select_hosts(options, must_serve=False)
    names = {host.name for host in hosts}
    for host in hosts if service in (None, MAIN_SERVICE) else ():
        # The cluster could not start without all members.
        members = host.settings.settings.cluster.hosts
        if excluded := [name for name in members if name not in names]:
            problem = f"is in a cluster with {', '.join(excluded)}, which you did not select"
            raise SparkError.one(host.name, problem, next_command(options, command, *members))
    services = {host.name: chosen_services(host, service) for host in hosts}

    def run(host: Host, target: Target) -> tuple[bool, str]:
        chosen = services[target.name]
        # A refusal by a service does not affect the next service.
        lines = "; ".join(f"{tool.line(words[0], name, *words[1:])} 2>&1 || failed=1"
                          for name in chosen)  # fmt: skip
        script = (
            f"if [ -x {tool.HOST_TOOL} ]; then failed=0; {lines}; exit $failed; "
            "else echo 'not set up yet; fix: run spark-deploy up'; exit 1; fi"
        )
        # Each engine may use the whole start and stop timeout.
        serve = target.settings.settings.serve
        limit_s = (serve.start_timeout_s + serve.stop_timeout_s + 300) * len(chosen)
        ok, output = host.run_shell_command(
            shell(script), _sudo=target.data["_sudo"], _timeout=limit_s
        )
        return ok, output.stdout.strip()

    results = []
    for answer in query(hosts, run, doing="stopping" if command == "stop" else "starting"):
        ok, output = answer.value or (False, "")
        results.append({**answer.data(), "ok": ok, "output": output})
    texts = ([f"{result['host']}: {result['output'] or result['problem']}"] for result in results)
    print_result(options, results, texts, between="\n")
    return 0 if all(result["ok"] for result in results) else 1


@click.command
@click.option("--to", metavar="RELEASE", help="Return to this release instead.")
@shared_options(changes=True)
def rollback(options: Options, to: str | None) -> int:
    if not options.yes and not options.dry and sys.stdin.isatty():
        code = preview_rollback(select_hosts(options, must_serve=False), to)
        if code is not None:
            return code
    return run("rollback", options, {"releases.rollback_to": to})


def preview_rollback(hosts: Sequence[Target], to: str | None) -> int | None:
    """Print current and target release of each host; return an exit code if none can change."""
    service, codes = service_of(to) if to else MAIN_SERVICE, list[int]()

    def read(host: Host, _: Target) -> Rollback | Problem:
        answer: Rollback | Problem = host.get_fact(RollbackPreview, service=service, to=to)
        return answer

    answers: list[Answer[Rollback | Problem]] = query(hosts, read)
    for answer in answers:
        name, change = answer.host.name, answer.value
        if change is None or isinstance(change, Problem):
            note(f"{name}: {change or answer.problem}")
            codes.append(1)
        elif change.done or change.to is None:
            note(f"{name}: {change.done or 'no earlier release'}")
            codes.append(0)
        else:
            note(f"{name}: rolls back from {change.from_release or 'nothing'} to {change.to}")
    return max(codes) if len(codes) == len(hosts) else None


@click.command
@shared_options(plans=True, changes=True)
def prune(options: Options) -> int:
    return run("prune", options)


@click.command("rotate-key")
@shared_options(changes=True)
def rotate_key(options: Options) -> int:
    return run("rotate-key", options)


@click.command
@click.option("--models", is_flag=True, help="Also remove models.")
@click.option("--engine", is_flag=True, help="Also remove Docker and CUDA that a deploy installed.")
@click.option("--access", is_flag=True, help="Finally revoke SSH key, sudo rule and account.")
@shared_options(changes=True)
def uninstall(options: Options, models: bool, engine: bool, access: bool) -> int:
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
    data = {"fabric.restore": restore, "fabric.measure": measure}
    return run("fabric", options, data, question="measure" if measure else "fabric")


_QUESTIONS = {
    "fabric": "Change the network of the ports between them? (--dry shows the file)",
    "measure": "Send up to 1 GB over each port to the next host, while they serve?",
    "rollback": "Return to the previous release?",
    "prune": "Remove files and images that no kept release needs? (--dry lists each item)",
    "requantize": "Quantize there, for hours, with all of the host's memory?",
    "rotate-key": "Create a new API key and reject the old one at once?",
    "uninstall": "Uninstall? (--dry lists removed and kept files)",
    "access": "Uninstall, then revoke this machine's access? (--dry lists both)",
}


def run(
    command: str, options: Options, data: Mapping[str, Any] | None = None, *, question: str = ""
) -> int:
    """Run the deploy of a command on the selected hosts; return pyinfra's exit code.

    ``data`` has the command's own settings; ``question`` is a key of ``_QUESTIONS``.
    """
    more = [_assignment(key, value) for key, value in (data or {}).items() if value]
    try:
        hosts = select_hosts(
            replace(options, data=[*options.data, *more]),
            must_serve=makes_plan(deploy_file(command)),
        )
    except SettingsError as error:
        raise SettingsError([
            replace(problem, where="--to") if problem.where == "--data: releases.rollback_to"
            else problem for problem in error.problems
        ]) from error  # fmt: skip
    names = [host.name for host in hosts]
    if not options.dry:
        confirm(options.yes, f"{', '.join(names)}: {_QUESTIONS.get(question or command, command)}")
    flags = ["--dry" if options.dry else "-y", *["--json"] * options.json]
    print_command(pyinfra_command(command, options, names, flags, more))
    options = replace(options, data=[*options.data, *more])
    code = deploy(command, hosts, options, as_json=options.json)
    if code not in (0, INTERRUPTED):
        for problem in check_access(hosts).problems():
            print_problem(problem)
    return code


def confirm(is_confirmed: bool, question: str) -> None:
    """Ask for confirmation unless ``--yes`` gave it; without a terminal fail."""
    if is_confirmed:
        return
    if not sys.stdin.isatty():
        raise SparkError.one("confirmation", "needs a terminal", "run it in a terminal, or with -y")
    click.confirm(question, abort=True, err=True)


def deploy(
    command: str,
    hosts: Sequence[Target],
    options: Options,
    *,
    as_json: bool = False,
    failed: set[str] | None = None,
) -> int:
    """Run a command's pyinfra deploy in this process; return pyinfra's exit code.

    ``failed`` gets the names of failed hosts.
    """
    run = functools.partial(
        run_deploy,
        CHECKOUT / deploy_file(command),
        [(host.name, host.data) for host in hosts],
        options.data,
        failed=failed,
    )
    if options.verbose or options.dry or as_json:
        return run(dry=options.dry, as_json=as_json)
    console = Console(stderr=options.json, highlight=False)
    return watch(
        lambda watcher: run(watcher=watcher, log=watcher.log),
        [host.name for host in hosts], cache_folder() / f"{command}.log", console,
    )  # fmt: skip


def pyinfra_command(
    command: str,
    options: Options,
    hosts: Iterable[str],
    flags: Sequence[str] = (),
    data: Sequence[str] = (),
) -> list[str]:
    """Return the equivalent pyinfra command, with every host by name."""
    pair = {key: getattr(options, key) for key in ("model", "profile")}
    data = [*options.data, *(_assignment(k, value) for k, value in pair.items() if value), *data]
    return [
        "pyinfra", str(inventory_path(options)), str(CHECKOUT / deploy_file(command)),
        *(word for host in hosts for word in ("--limit", host)),
        *(word for item in data for word in ("--data", item)), *flags,
    ]  # fmt: skip


def deploy_file(command: str) -> str:
    return "deploy.py" if command == "up" else f"deploys/{command.replace('-', '_')}.py"


def _assignment(key: str, value: Any) -> str:
    return f"{key}={'true' if value is True else value}"


def print_command(words: Sequence[str]) -> None:
    print(shlex.join([command_path(words[0]), *words[1:]]), file=sys.stderr, flush=True)
