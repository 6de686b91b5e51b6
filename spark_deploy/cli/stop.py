"""``spark-deploy stop`` and ``start``: take hosts out of service and back."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence

import click
from pyinfra.api.host import Host
from spark_contract import tool
from spark_contract.units import MAIN_SERVICE

from spark_deploy.cli.hosts import Target, chosen_services, select_hosts
from spark_deploy.cli.options import Options, service_option, shared_options
from spark_deploy.cli.query_hosts import query
from spark_deploy.cli.terminal import next_command, print_result
from spark_deploy.config.errors import SparkError
from spark_deploy.hosts.commands import shell

_UNITS_S = {"m": 60, "h": 3600, "d": 86400}


@click.command
@service_option("Only this service.")
@click.option("--for", "period", metavar="PERIOD", help="Start again after 30m, 1h or 2d.")
@shared_options()
def stop(options: Options, service: str | None, period: str | None) -> int:
    """Exit with 1 if a host did not stop."""
    words = [tool.STOP_SERVICE, "--by", f"{getpass.getuser()}@{socket.gethostname()}"]
    if period is not None:
        words += ["--for", str(_seconds(period))]
    return _run(options, "stop", words, service)


@click.command
@service_option("Only this service.")
@shared_options()
def start(options: Options, service: str | None) -> int:
    """Exit with 1 if a host did not start the last proven release."""
    return _run(options, "start", [tool.START_SERVICE], service)


def _run(options: Options, command: str, words: list[str], service: str | None) -> int:
    hosts = select_hosts(options, judged=False)
    if service in (None, MAIN_SERVICE):
        _refuse_partial_cluster(hosts, options, command)
    services = {host.name: chosen_services(host, service) for host in hosts}

    def run(host: Host, target: Target) -> tuple[bool, str]:
        return _run_tool(host, target, [[words[0], s, *words[1:]] for s in services[target.name]])

    results = []
    for answer in query(hosts, run, doing="stopping" if command == "stop" else "starting"):
        ok, output = answer.value or (False, "")
        results.append({**answer.data(), "ok": ok, "output": output})
    texts = ([f"{result['host']}: {result['output'] or result['problem']}"] for result in results)
    print_result(options, results, texts, between="\n")
    return 0 if all(result["ok"] for result in results) else 1


def _refuse_partial_cluster(hosts: Sequence[Target], options: Options, command: str) -> None:
    """Refuse to stop single members: the remaining members would restart in vain."""
    chosen = {host.name for host in hosts}
    for host in hosts:
        members = host.settings.settings.cluster.hosts
        if left_out := [name for name in members if name not in chosen]:
            problem = f"serves together with {', '.join(left_out)}, not selected"
            raise SparkError.one(host.name, problem, next_command(options, command, *members))


def _seconds(period: str) -> int:
    number, unit = period[:-1], period[-1:]
    if not number.isdecimal() or not int(number) or unit not in _UNITS_S:
        fix = "write a number and m, h or d: --for 90m"
        raise SparkError.one("--for", f"{period!r} is not a period", fix)
    return int(number) * _UNITS_S[unit]


def _run_tool(host: Host, target: Target, commands: list[list[str]]) -> tuple[bool, str]:
    settings = target.settings.settings
    # A refusal by a service does not affect the next service.
    lines = "; ".join(f"{tool.line(*words)} 2>&1 || failed=1" for words in commands)
    script = (
        f"if [ -x {tool.HOST_TOOL} ]; then failed=0; {lines}; exit $failed; "
        "else echo 'not set up yet; fix: run spark-deploy up'; exit 1; fi"
    )
    # Each engine may use the whole start and stop timeout.
    serve = settings.serve
    limit_s = (serve.start_timeout_s + serve.stop_timeout_s + 300) * len(commands)
    ok, output = host.run_shell_command(shell(script), _sudo=target.data["_sudo"], _timeout=limit_s)
    return ok, output.stdout.strip()
