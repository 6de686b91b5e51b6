"""Commands that change hosts: with pyinfra deploys, or with the host tools (stop, start)."""

import functools
import getpass
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import click
from pyinfra.api.host import Host
from rich.console import Console
from spark_contract import tool
from spark_contract.release import parse_service
from spark_contract.status import Rollback
from spark_contract.tool import Problem
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
    inventory_path,
    query,
    read_status,
    select_hosts,
    selected_services,
)
from spark_deploy.cli.progress_screen import INTERRUPTED, watch
from spark_deploy.config.checkout import CHECKOUT, cache_folder
from spark_deploy.config.errors import SettingsError, SparkError
from spark_deploy.hosts.commands import shell
from spark_deploy.hosts.status import HostStatus, RollbackPreview
from spark_deploy.inventory.command_line import makes_plan
from spark_deploy.inventory.run import run_deploy

T = TypeVar("T")


def dry_run(
    options: Options,
    answers: Sequence[Answer[T]],
    describe: Callable[[Target, T], str],
    argv: Sequence[str] = (),
) -> int:
    """Print the planned changes per host, then ``argv``; return 1 if a host did not answer."""
    results = []
    for answer in answers:
        text = answer.problem if answer.value is None else describe(answer.host, answer.value)
        results.append({**answer.data(), "text": text})
    texts = ([f"{result['host']}: {result['text']}"] for result in results)
    print_result(options, results, texts, separator="\n")
    note_no_changes(argv)
    return 0 if all(result["reachable"] for result in results) else 1


def note_no_changes(argv: Sequence[str] = ()) -> None:
    note("no changes made; run this command to list every step:" if argv else "no changes made")
    if argv:
        print_command(argv)


@click.command
@click.option("--to", metavar="RELEASE", help="Return to this release instead.")
@shared_options(changes=True)
def rollback(options: Options, to: str | None) -> int:
    data = {"releases.rollback_to": to}
    if options.dry and not options.verbose:
        hosts, argv = _select("rollback", options, data)
        return dry_run(options, _query_rollback(hosts, to), _rollback_text, argv)
    if not options.yes and not options.dry and sys.stdin.isatty():
        code = preview_rollback(select_hosts(options, must_serve=False), to)
        if code is not None:
            return code
    return run("rollback", options, data)


def _query_rollback(hosts: Sequence[Target], to: str | None) -> list[Answer[Rollback | Problem]]:
    service = parse_service(to) if to else MAIN_SERVICE

    def read(host: Host, _: Target) -> Rollback | Problem:
        answer: Rollback | Problem = host.get_fact(RollbackPreview, service=service, target=to)
        return answer

    return query(hosts, read)


def _rollback_text(_host: Target, change: Rollback | Problem) -> str:
    if isinstance(change, Problem):
        return change.line
    if change.done:
        return change.done
    if change.to is None:
        return "no earlier release"
    return f"will roll back from {change.from_release or 'nothing'} to {change.to}"


def preview_rollback(hosts: Sequence[Target], to: str | None) -> int | None:
    """Print what a rollback would do on each host; return an exit code if no host would change."""
    codes: list[int] = []  # of the hosts that would not change
    for answer in _query_rollback(hosts, to):
        change = answer.value
        text = answer.problem if change is None else _rollback_text(answer.host, change)
        note(f"{answer.host.name}: {text}")
        if change is None or isinstance(change, Problem):
            codes.append(1)
        elif change.done or change.to is None:
            codes.append(0)
    return max(codes) if len(codes) == len(hosts) else None


@click.command
@shared_options(plans=True, changes=True)
def prune(options: Options) -> int:
    return run("prune", options)


@click.command("rotate-key")
@shared_options(changes=True)
def rotate_key(options: Options) -> int:
    if options.dry and not options.verbose:
        hosts, argv = _select("rotate-key", options, {})
        return dry_run(options, query(hosts, read_status), _rotation_text, argv)
    return run("rotate-key", options)


def _rotation_text(_host: Target, status: HostStatus) -> str:
    if not status.installed:
        return "not set up yet"
    return "will create a new API key; clients with the old key get 401 at once"


@click.command
@click.option("--models", is_flag=True, help="Also remove models.")
@click.option(
    "--engine", is_flag=True, help="Also remove Docker and CUDA if a deploy installed them."
)
@click.option(
    "--access",
    is_flag=True,
    help="Also remove the SSH key, sudo rule and account, as the last step.",
)
@shared_options(changes=True)
def uninstall(options: Options, models: bool, engine: bool, access: bool) -> int:
    data = {"uninstall.models": models, "uninstall.engine": engine}
    code = run("uninstall", options, data, question="access" if access else "uninstall")
    if access and code == 0:
        # This deploy runs last, because the controller cannot log in afterwards. The user has
        # already confirmed both deploys.
        return run("unbootstrap", replace(options, yes=not options.dry))
    return code


@click.command
@click.option("--restore", is_flag=True, help="Restore the previous network.")
@click.option("--measure", is_flag=True, help="Measure each link without changing it.")
@shared_options(changes=True)
def fabric(options: Options, restore: bool, measure: bool) -> int:
    data = {"fabric.restore": restore, "fabric.measure": measure}
    return run("fabric", options, data, question="measure" if measure else "fabric")


_QUESTIONS = {
    "stop": "Stop serving? Clients get 503 until you run start.",
    "start": "Start the last proven releases?",
    "fabric": "Change the network configuration between these hosts? (--dry prints the file)",
    "measure": "Send up to 1 GB over each port to the next host while the hosts serve requests?",
    "rollback": "Return to the previous release?",
    "prune": "Remove files and images that releases no longer need? (--dry lists each item)",
    "requantize": "Quantize the model? (takes hours and all of the host's memory)",
    "rotate-key": "Create a new API key and reject the old one at once?",
    "uninstall": "Uninstall? (--dry lists what would be removed and kept)",
    "access": (
        "Uninstall, then remove this machine's access? (--dry lists what would be removed and kept)"
    ),
}


def run(
    command: str, options: Options, data: Mapping[str, Any] | None = None, *, question: str = ""
) -> int:
    """Run a command's deploy on the selected hosts; return pyinfra's exit code.

    ``data`` contains settings for the deploy; ``question`` is a key of ``_QUESTIONS``.
    """
    hosts, argv = _select(command, options, data or {})
    names = ", ".join(host.name for host in hosts)
    if not options.dry:
        confirm(options, f"{names}: {_QUESTIONS.get(question or command, command)}")
    print_command(argv)
    options = replace(options, data=[*options.data, *_assignments(data or {})])
    code = deploy(command, hosts, options, as_json=options.json)
    if code not in (0, INTERRUPTED):
        for problem in check_access(hosts).problems():
            print_problem(problem)
    elif options.dry:
        note_no_changes()
    return code


def _assignments(data: Mapping[str, Any]) -> list[str]:
    """Return ``data`` as values of ``--data``; leave out false and empty values."""
    return [f"{key}={'true' if value is True else value}" for key, value in data.items() if value]


def _select(
    command: str, options: Options, data: Mapping[str, Any]
) -> tuple[list[Target], list[str]]:
    """Return the selected hosts and the equivalent pyinfra command."""
    assignments = _assignments(data)
    try:
        hosts = select_hosts(
            replace(options, data=[*options.data, *assignments]),
            must_serve=makes_plan(deploy_file(command)),
        )
    except SettingsError as error:
        flag_of_setting = {"--data: releases.rollback_to": "--to"}
        raise SettingsError([
            replace(problem, where=flag_of_setting.get(problem.where, problem.where))
            for problem in error.problems
        ]) from error  # fmt: skip
    flags = ["--dry" if options.dry else "-y", *(["--json"] if options.json else [])]
    names = [host.name for host in hosts]
    return hosts, pyinfra_command(command, options, names, flags, assignments)


def confirm(options: Options, question: str) -> None:
    """Ask for confirmation unless ``--yes`` was given; raise if there is no terminal."""
    check_confirmable(options)
    if not options.yes:
        click.confirm(question, abort=True, err=True)


def check_confirmable(options: Options) -> None:
    if not options.yes and not sys.stdin.isatty():
        raise SparkError.single("confirmation", "requires a terminal", "use a terminal, or add -y")


def deploy(
    command: str,
    hosts: Sequence[Target],
    options: Options,
    *,
    as_json: bool = False,
    failed: set[str] | None = None,
) -> int:
    """Run a command's pyinfra deploy in this process; return pyinfra's exit code.

    The names of failed hosts are added to ``failed``.
    """
    run = functools.partial(
        run_deploy,
        CHECKOUT / deploy_file(command),
        [(host.name, host.data) for host in hosts],
        options.data,
        failed_hosts=failed,
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
    """Return the equivalent pyinfra command for these hosts."""
    assignments = [*options.data, *_assignments(options.choice), *data]
    return [
        "pyinfra", str(inventory_path(options)), str(CHECKOUT / deploy_file(command)),
        *(argument for host in hosts for argument in ("--limit", host)),
        *(argument for text in assignments for argument in ("--data", text)), *flags,
    ]  # fmt: skip


def deploy_file(command: str) -> str:
    return "deploy.py" if command == "up" else f"deploys/{command.replace('-', '_')}.py"


def print_command(argv: Sequence[str]) -> None:
    print(shlex.join([command_path(argv[0]), *argv[1:]]), file=sys.stderr, flush=True)


_UNIT_SECONDS = {"m": 60, "h": 3600, "d": 86400}


@click.command
@service_option("Only this service.")
@click.option(
    "--for", "period", metavar="PERIOD", help="Start again after PERIOD, such as 30m, 1h or 2d."
)
@shared_options(confirms=True)
def stop(options: Options, service: str | None, period: str | None) -> int:
    """Return 1 if a host did not stop."""
    arguments = [tool.STOP_SERVICE, "--by", f"{getpass.getuser()}@{socket.gethostname()}"]
    if period is not None:
        number, unit = period[:-1], period[-1:]
        if not number.isdecimal() or not int(number) or unit not in _UNIT_SECONDS:
            problem = f"invalid period {period!r}, expected a number followed by m, h or d"
            raise SparkError.single("--for", problem, "use a valid period, for example `--for 90m`")
        arguments += ["--for", str(int(number) * _UNIT_SECONDS[unit])]
    return _run_tool(options, "stop", arguments, service)


@click.command
@service_option("Start only this service.")
@shared_options(confirms=True)
def start(options: Options, service: str | None) -> int:
    """Return 1 if a host did not start the last proven release."""
    return _run_tool(options, "start", [tool.START_SERVICE], service)


def _run_tool(options: Options, command: str, arguments: list[str], service: str | None) -> int:
    hosts = select_hosts(options, must_serve=False)
    if service in (None, MAIN_SERVICE):
        _require_all_members(options, command, hosts)
    services = {host.name: selected_services(host, service) for host in hosts}

    def describe(host: Target, status: HostStatus) -> str:
        return "; ".join(_preview_text(command, status, name) for name in services[host.name])

    if options.dry:
        return dry_run(options, query(hosts, read_status), describe)
    if len(hosts) > 1:
        confirm(options, f"{', '.join(host.name for host in hosts)}: {_QUESTIONS[command]}")

    def run(host: Host, target: Target) -> tuple[bool, str]:
        names = services[target.name]
        verb, *flags = arguments
        # If the command fails for a service, continue with the next service.
        commands = "; ".join(
            f"{tool.command_line(verb, name, *flags)} 2>&1 || failed=1" for name in names
        )
        script = (
            f"if [ -x {tool.HOST_TOOL} ]; then failed=0; {commands}; exit $failed; "
            "else echo 'not set up yet; fix: run `spark-deploy up`'; exit 1; fi"
        )
        # Each engine may need its full start and stop timeouts.
        serve = target.settings.serve
        timeout_s = (serve.start_timeout_s + serve.stop_timeout_s + 300) * len(names)
        ok, output = host.run_shell_command(
            shell(script), _sudo=target.data["_sudo"], _timeout=timeout_s
        )
        return ok, output.stdout.strip()

    results = []
    for answer in query(hosts, run, verb="stopping" if command == "stop" else "starting"):
        ok, output = answer.value or (False, "")
        results.append({**answer.data(), "ok": ok, "output": output})
    texts = ([f"{result['host']}: {result['output'] or result['problem']}"] for result in results)
    print_result(options, results, texts, separator="\n")
    return 0 if all(result["ok"] for result in results) else 1


def _require_all_members(options: Options, command: str, hosts: list[Target]) -> None:
    """Raise if only some members of a cluster are selected, because they start only together."""
    names = {host.name for host in hosts}
    for host in hosts:
        members = host.settings.cluster.hosts
        if missing := [name for name in members if name not in names]:
            problem = f"is in a cluster with {', '.join(missing)}, which must be selected too"
            fix = f"run `{next_command(options, command, *members)}`"
            raise SparkError.single(host.name, problem, fix)


def _preview_text(command: str, status: HostStatus, name: str) -> str:
    service = status.service(name)
    active = service.active if service else None
    release_name = active or (service.known_good if service else None)
    release = status.release(release_name)
    text = f"{release.model} with {release.profile}" if release else release_name
    if command == "start":
        verb = "already serves" if active else "will serve"
        return f"{name} {verb} {text or 'nothing: run `spark-deploy up`'}"
    return f"{name} will stop: {text}; clients get 503" if active else f"{name} serves nothing"
