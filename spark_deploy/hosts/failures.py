"""Report a failure: which release the host still serves, the cause, and the engine's log file."""

import re
import textwrap
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from paramiko import SSHException
from pyinfra.api import BaseStateCallback, Host, State
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.output import echo, format_text
from spark_contract import tool
from spark_contract.records import Rollout
from spark_contract.release import parse_service
from spark_contract.units import MAIN_SERVICE

from spark_deploy.config.checkout import cache_folder
from spark_deploy.config.errors import printable
from spark_deploy.hosts.commands import is_disconnected, run_script
from spark_deploy.hosts.status import HostStatus, parse_status

_HEADLINE_LENGTH = 120
# Reasons can quote an answer with semicolons.
_REASON_SEPARATOR = re.compile(
    r"; (?=check |the old release |fix: |[A-Za-z]+(?:Error|Exception)\b)"
)
_failures: WeakKeyDictionary[Host, Sequence[str]] = WeakKeyDictionary()


class RepeatFailures(BaseStateCallback):
    """Print the failures of each host again, after pyinfra's results."""

    @staticmethod
    def host_disconnect(state: State, host: Host) -> None:
        lines = _failures.pop(host, ())
        if host in state.failed_hosts:
            for line in lines:
                echo(format_text(line, fg="red"), err=True)


def show_failure(host: Host, lines: Sequence[str]) -> None:
    _failures[host] = lines
    for line in lines:
        host.log_styled(line, fg="red")


def read_status(host: Host) -> HostStatus:
    """Return the status of a host; an empty status if it cannot be read."""
    try:
        if is_disconnected(host):
            return HostStatus(None)
        result = run_script(host, tool.when_installed(tool.command_line(tool.STATUS)))
        return parse_status(result.stdout) if result.ok else HostStatus(None)
    except (TimeoutError, OSError, EOFError, SSHException, PyinfraError, ValueError):
        return HostStatus(None)


def describe_serving(name: str, status: HostStatus, service: str = MAIN_SERVICE) -> str:
    state = status.service(service)
    if state is None:
        return ""
    receives_requests = state.traffic_open or state.head
    active = status.release(state.active) if receives_requests else None
    if active is None:
        return f"{name} serves nothing"
    return f"{name} still serves {active.model} with {active.profile}"


def describe_rollout_failure(
    host: Host, release: str, rollout: Rollout, subject: str = "the new release"
) -> list[str]:
    """Describe a failed rollout; write the end of the engine's log to a file."""
    serving = describe_serving(host.name, read_status(host), parse_service(release))
    serving = serving or f"{host.name} does not report which release it serves"
    reason, *details = _REASON_SEPARATOR.split(rollout.reason or "it was interrupted")
    phase = rollout.failed_phase or rollout.phase
    lines = [
        f"{serving}; {_describe_outcome(release, rollout, subject)}: {_shorten_reason(reason)}",
        f"  {release}: {rollout.state} in phase {phase}: {reason}",
        *(f"  {detail}" for detail in details),
    ]
    if rollout.state == "failed-no-previous":
        lines.append("  there is no earlier release to restore")
    if not any(detail.startswith("fix: ") for detail in details):
        lines.append("  fix: correct the cause above, then retry")
    if rollout.log_tail:
        lines.append(f"  engine log: {_write_log(host.name, rollout)}")
    return [printable(line) for line in lines]


def _describe_outcome(release: str, rollout: Rollout, subject: str) -> str:
    if not rollout.ended_at:  # it may not even have started
        return f"the rollout of {subject} was interrupted"
    if rollout.serving == release:
        return "the check of this release failed"
    return f"{subject} was rejected"


def _shorten_reason(reason: str) -> str:
    """Shorten a reason for the headline, without the check's name and the text of wrong answers."""
    cause = re.sub(r"^check [\w ]+: ", "", reason)
    cause = re.sub(r"(wrong answer to (['\"]).*?\2): .*", r"\1", cause)
    return textwrap.shorten(cause, _HEADLINE_LENGTH, placeholder=" …")


def _write_log(name: str, rollout: Rollout) -> str:
    path = cache_folder() / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}-engine.log"
    path.write_text("".join(f"{printable(line)}\n" for line in rollout.log_tail), "utf-8")
    return str(path)
