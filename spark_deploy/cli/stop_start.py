"""``spark-deploy stop`` and ``start``: stop and start services with the host tools."""

import getpass
import socket

import click
from pyinfra.api.host import Host
from spark_contract import tool
from spark_contract.units import MAIN_SERVICE

from spark_deploy.cli.changes import confirm, dry_run
from spark_deploy.cli.console import (
    Options,
    next_command,
    print_result,
    service_option,
    shared_options,
)
from spark_deploy.cli.hosts import Target, query, read_status, select_hosts, selected_services
from spark_deploy.config.errors import SparkError
from spark_deploy.hosts.commands import shell
from spark_deploy.hosts.status import HostStatus

_UNIT_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_QUESTIONS = {
    "stop": "Stop serving? Clients get 503 until you run start.",
    "start": "Start the last proven releases?",
}


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
            problem = f"invalid period {period!r}, expected a number with m, h or d"
            raise SparkError.one("--for", problem, "add a valid period, for example `--for 90m`")
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
    if options.dry:
        return dry_run(options, query(hosts, read_status), lambda host, status: "; ".join(
            _preview_text(command, status, name) for name in services[host.name]))  # fmt: skip
    if len(hosts) > 1:
        confirm(options, f"{', '.join(host.name for host in hosts)}: {_QUESTIONS[command]}")

    def run(host: Host, target: Target) -> tuple[bool, str]:
        names = services[target.name]
        # If a service fails, continue with the next.
        verb, *flags = arguments
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
    """Reject part of a cluster, because its members start only together."""
    names = {host.name for host in hosts}
    for host in hosts:
        members = host.settings.cluster.hosts
        if missing := [name for name in members if name not in names]:
            problem = f"is in a cluster with {', '.join(missing)}, which you did not select"
            fix = f"run `{next_command(options, command, *members)}`"
            raise SparkError.one(host.name, problem, fix)


def _preview_text(command: str, status: HostStatus, name: str) -> str:
    service = status.service(name)
    active, good = (service.active, service.known_good) if service else (None, None)
    release = status.release(active or good)
    text = f"{release.model} with {release.profile}" if release else active or good
    if command == "start":
        return f"{name} {'already serves' if active else 'will serve'} {text or 'nothing: run up'}"
    return f"{name} will stop: {text}; clients get 503" if active else f"{name} serves nothing"
