"""``spark-deploy stop`` and ``start``: take hosts out of service, and back into it."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence
from typing import Any

import click
from pyinfra.api.host import Host
from spark_contract import tool
from spark_contract.units import MAIN_SERVICE

from spark_deploy.cli.hosts import Target, chosen_services, select_hosts
from spark_deploy.cli.options import Options, service_option, shared_options
from spark_deploy.cli.query_hosts import Answer, query
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
    return _order_all(options, "stop", words, service)


@click.command
@service_option("Only this service.")
@shared_options()
def start(options: Options, service: str | None) -> int:
    """Exit with 1 if a host did not start its last proven release."""
    return _order_all(options, "start", [tool.START_SERVICE], service)


def _order_all(options: Options, command: str, words: list[str], service: str | None) -> int:
    hosts = select_hosts(options, judged=False)
    if service in (None, MAIN_SERVICE):
        _refuse_half_a_cluster(hosts, options, command)
    orders = {
        host.name: [[words[0], name, *words[1:]] for name in chosen_services(host, service)]
        for host in hosts
    }
    answers = query(
        hosts, lambda host, one: _order(host, one, orders[one.name]),
        doing="stopping" if command == "stop" else "starting",
    )  # fmt: skip
    found = [_outcome(one) for one in answers]
    texts = ([f"{one['host']}: {one['said'] or one['problem']}"] for one in found)
    print_result(options, found, texts, between="\n")
    return 0 if all(one["ok"] for one in found) else 1


def _refuse_half_a_cluster(hosts: Sequence[Target], options: Options, command: str) -> None:
    """Refuse to take one member from the others, who would start again for nothing."""
    chosen = {one.name for one in hosts}
    for one in hosts:
        members = one.settings.settings.cluster.hosts
        left_out = [name for name in members if name not in chosen]
        if left_out:
            what = f"serves together with {', '.join(left_out)}, which the command leaves out"
            raise SparkError.one(one.name, what, next_command(options, command, *members))


def _seconds(period: str) -> int:
    number, unit = period[:-1], period[-1:]
    if not number.isdecimal() or not int(number) or unit not in _UNITS_S:
        fix = "a number and one of m, h, d: --for 90m"
        raise SparkError.one("--for", f"{period!r} is no period", fix)
    return int(number) * _UNITS_S[unit]


def _order(host: Host, one: Target, orders: Sequence[Sequence[str]]) -> tuple[bool, str]:
    settings = one.settings.settings
    # What one service refuses does not keep the others from obeying.
    each = "; ".join(f"{tool.line(*words)} 2>&1 || failed=1" for words in orders)
    script = (
        f"if [ -x {tool.HOST_TOOL} ]; then failed=0; {each}; exit $failed; "
        "else echo 'nothing of ours is installed yet; run deploy.py'; exit 1; fi"
    )
    # Each engine may take its whole start, and its stop, to answer.
    limit_s = (settings.serve.start_timeout_s + settings.serve.stop_timeout_s + 300) * len(orders)
    ok, output = host.run_shell_command(shell(script), _sudo=one.data["_sudo"], _timeout=limit_s)
    return ok, output.stdout.strip()


def _outcome(answered: Answer[tuple[bool, str]]) -> dict[str, Any]:
    ok, said = answered.value or (False, "")
    return {**answered.data(), "ok": ok, "said": said}
