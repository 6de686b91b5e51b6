"""``spark-deploy stop`` and ``start``: take hosts out of service, and back into it."""

from __future__ import annotations

import getpass
import shlex
import socket
from collections.abc import Sequence
from typing import Any

from pyinfra.api.host import Host
from spark_contract.paths import HOST_TOOL

from spark_deploy.cli.commands import Options
from spark_deploy.cli.hosts import Listed, answer, listed, say
from spark_deploy.cli.looking import Answer, look, plain_answer
from spark_deploy.errors import SparkError
from spark_deploy.operations.commands import heartbeat, shell
from spark_deploy.planning.serving.gateway import SERVICE

_UNITS_S = {"m": 60, "h": 3600, "d": 86400}


def run(options: Options) -> int:
    """Stop or start the service on the chosen hosts; 1 when one did not obey.

    A start serves the last proven release again.
    """
    words = [f"{options.command}-service", SERVICE]
    if options.command == "stop":
        words += ["--by", f"{getpass.getuser()}@{socket.gethostname()}"]
        words += ["--for", str(_seconds(options.period))] if options.period else []
    answers = look(listed(options), lambda host, one: _order(host, one, words))
    found = [_outcome(one) for one in answers]
    texts = ([f"{one['host']}: {one['said'] or one['problem']}"] for one in found)
    answer(options, found, texts, between="\n")
    return 0 if all(one["ok"] for one in found) else 1


def _seconds(period: str) -> int:
    number, unit = period[:-1], period[-1:]
    if not number.isdigit() or not int(number) or unit not in _UNITS_S:
        fix = "a number and one of m, h, d: --for 90m"
        raise SparkError.one("--for", f"{period!r} is no period", fix)
    return int(number) * _UNITS_S[unit]


def _order(host: Host, one: Listed, words: Sequence[str]) -> tuple[bool, str]:
    settings = one.settings.settings
    script = (
        f"if [ -x {HOST_TOOL} ]; then {HOST_TOOL} {shlex.join(words)} 2>&1; "
        "else echo 'nothing of ours is installed yet; run deploy.py'; exit 1; fi"
    )
    # The engine may take its whole start, and its stop, to answer.
    limit_s = settings.serve.start_timeout_s + settings.serve.stop_timeout_s + 300
    with heartbeat(host, words[0], report=lambda text: say(f"{one.name}: {text}")):
        ok, output = host.run_shell_command(
            shell(script), _sudo=one.data["_sudo"], _timeout=limit_s
        )
    return ok, output.stdout.strip()


def _outcome(answered: Answer[tuple[bool, str]]) -> dict[str, Any]:
    ok, said = answered.value or (False, "")
    return {**plain_answer(answered), "ok": ok, "said": said}
