"""Ask hosts something without changing them, all at the same time, over pyinfra's connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import gevent
from pyinfra.api.config import Config
from pyinfra.api.connect import disconnect_all
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory
from pyinfra.api.state import BaseStateCallback, State, StateStage
from pyinfra.context import ctx_host, ctx_state

from spark_deploy.cli.hosts import Listed, few, say
from spark_deploy.cli.reach import QUIET_S, with_fix
from spark_deploy.config.documents.shown import in_words
from spark_deploy.config.errors import SparkError
from spark_deploy.hosts.status import HostStatus, Status
from spark_deploy.inventory.host_keys import readable_ssh_files
from spark_deploy.inventory.output_limits import listen_carefully
from spark_deploy.ticking import ticking

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What one host said; ``problem`` is set when it said nothing."""

    host: Listed
    value: T | None
    problem: str = ""


class _Refused(BaseStateCallback):
    """Keeps the reason why a connection failed; pyinfra only logs it."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def host_connect_error(  # type: ignore[override]  # called on the instance
        self, state: State, host: Host, error: Exception
    ) -> None:
        """Remember the reason."""
        self.reasons[host.name] = str(error)


def status_of(host: Host, one: Listed) -> HostStatus | None:
    """Ask a host for its state, wherever it has our tools."""
    found: HostStatus | None = host.get_fact(Status)
    return found


def look(
    hosts: Sequence[Listed], ask: Callable[[Host, Listed], T | None], *, doing: str = "asking"
) -> list[Answer[T]]:
    """Return one answer for each host, in the order of the inventory.

    Of those who take their time it is said who they are, and what is done there meanwhile.
    """
    data = [(host.name, host.data) for host in hosts]
    inventory = Inventory((data, {}))  # type: ignore[no-untyped-call]  # pyinfra
    state = State(inventory, Config())  # type: ignore[no-untyped-call]  # pyinfra
    refused = _Refused()
    state.add_callback_handler(refused)  # type: ignore[no-untyped-call]  # pyinfra
    state.set_stage(StateStage.Connect)
    by_name = {host.name: host for host in hosts}
    with ctx_state.use(state):
        tasks = [
            gevent.spawn(_one, state, host, by_name[host.name], refused, ask) for host in inventory
        ]

        def slow() -> str:
            names = [one.name for one, task in zip(hosts, tasks, strict=True) if not task.ready()]
            return f"{doing} {few(names)}"

        with ticking(slow, say, first_s=QUIET_S):
            gevent.joinall(tasks, raise_error=True)
        disconnect_all(state)
    return [task.get() for task in tasks]


def _one(
    state: State,
    host: Host,
    listed: Listed,
    refused: _Refused,
    ask: Callable[[Host, Listed], T | None],
) -> Answer[T]:
    with ctx_host.use(host):
        try:
            with readable_ssh_files():
                host.connect(raise_exceptions=False, show_errors=False)
            if not host.connected:
                reason = refused.reasons.get(host.name, "no reason given")
                return Answer(listed, None, f"cannot be reached: {with_fix(in_words(reason))}")
            state.activate_host(host)
            listen_carefully()
            value = ask(host, listed)
        except (PyinfraError, OSError) as error:
            return Answer(listed, None, f"cannot be asked: {_why(host, state, error)}")
    return Answer(listed, value, "" if value is not None else "gave no answer that can be read")


def _why(host: Host, state: State, error: Exception) -> str:
    """Say why a host gave no answer; of a failed command pyinfra only says that no host is left."""
    if isinstance(error, SparkError):
        return error.problems[0].line
    if host not in state.failed_hosts:
        return str(error)
    if not host.data.get("_sudo"):
        return "a command that only looks failed there"
    return (
        "a command failed there, or sudo is missing or asks for a password; fix: run "
        "deploys/bootstrap.py, or set `sudo: false` where the login user is root"
    )


def plain_answer(answer: Answer[Any]) -> dict[str, Any]:
    """Return the parts of an answer that every command prints as JSON."""
    return {"host": answer.host.name, "reachable": answer.value is not None,
            "problem": answer.problem}  # fmt: skip
