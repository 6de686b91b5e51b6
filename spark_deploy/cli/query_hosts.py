"""Query hosts in parallel without changing them; check that a deploy could log in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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

from spark_deploy.cli.hosts import Target
from spark_deploy.cli.terminal import note, short_list
from spark_deploy.config.errors import Problem, SparkError, unreachable
from spark_deploy.config.printable import in_words
from spark_deploy.hosts.status import HostStatus, Status
from spark_deploy.inventory import host_keys, login
from spark_deploy.inventory.host_keys import Endpoint, Seen, readable_ssh_files
from spark_deploy.inventory.output_limits import listen_carefully
from spark_deploy.ticking import ticking

T = TypeVar("T")

QUIET_S = 2.0  # until a note names the hosts without an answer
_CHECK_NETWORK = "check that the host is on; check address and port"
_BOOTSTRAP = "run `spark-deploy up`, or deploys/bootstrap.py: it installs key and sudo rule"
# By pyinfra's reasons for a failed connection.
_FIXES = {
    "Could not connect": _CHECK_NETWORK,
    "Could not resolve hostname": _CHECK_NETWORK,
    "EOF error": _CHECK_NETWORK,
    "Authentication error": _BOOTSTRAP,
    "SSH host key error": _BOOTSTRAP,  # it shows both keys
    "No host key": _BOOTSTRAP,
}


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    host: Target
    value: T | None
    problem: str = ""

    def data(self) -> dict[str, Any]:
        """Return the fields that every command prints as JSON."""
        reachable = self.value is not None
        return {"host": self.host.name, "reachable": reachable, "problem": self.problem}


class _ConnectErrors(BaseStateCallback):
    """Keeps why connections failed; pyinfra only logs it."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def host_connect_error(  # type: ignore[override]  # called on the instance
        self, state: State, host: Host, error: Exception
    ) -> None:
        self.reasons[host.name] = str(error)


def read_status(host: Host, _target: Target) -> HostStatus | None:
    status: HostStatus | None = host.get_fact(Status)
    return status


def query(
    hosts: Sequence[Target], read: Callable[[Host, Target], T | None], *, doing: str = "querying"
) -> list[Answer[T]]:
    """Return an answer for each host, in the order of ``hosts``.

    ``doing`` precedes the names of slow hosts in notes.
    """
    data = [(host.name, host.data) for host in hosts]
    inventory = Inventory((data, {}))  # type: ignore[no-untyped-call]  # pyinfra
    state = State(inventory, Config())  # type: ignore[no-untyped-call]  # pyinfra
    errors = _ConnectErrors()
    state.add_callback_handler(errors)  # type: ignore[no-untyped-call]  # pyinfra
    state.set_stage(StateStage.Connect)
    with ctx_state.use(state):
        tasks = [
            gevent.spawn(_query_host, state, host, target, errors.reasons, read)
            for host, target in zip(inventory, hosts, strict=True)
        ]

        def slow() -> str:
            names = [host.name for host, task in zip(hosts, tasks, strict=True) if not task.ready()]
            return f"{doing} {short_list(names)}"

        with ticking(slow, note, first_s=QUIET_S):
            gevent.joinall(tasks, raise_error=True)
        disconnect_all(state)
    return [task.get() for task in tasks]


def _query_host(
    state: State,
    host: Host,
    target: Target,
    reasons: dict[str, str],
    read: Callable[[Host, Target], T | None],
) -> Answer[T]:
    with ctx_host.use(host):
        try:
            with readable_ssh_files():
                host.connect(raise_exceptions=False, show_errors=False)
            if not host.connected:
                reason = in_words(reasons.get(host.name, "no reason given"))
                return Answer(target, None, f"unreachable: {with_fix(reason)}")
            state.activate_host(host)
            listen_carefully()
            value = read(host, target)
        except (PyinfraError, OSError) as error:
            return Answer(target, None, f"query failed: {_reason(host, state, error)}")
    return Answer(target, value, "" if value is not None else "sent no readable answer")


def with_fix(reason: str) -> str:
    """Add the fix to pyinfra's reason for a failed connection."""
    fix = next((fix for text, fix in _FIXES.items() if text in reason), "")
    return f"{reason}; fix: {fix}" if fix else reason


def _reason(host: Host, state: State, error: Exception) -> str:
    """Explain a failed query; pyinfra reports a failed command only as "no hosts left"."""
    if isinstance(error, SparkError):
        return error.problems[0].line
    if host not in state.failed_hosts:
        return str(error)
    if not host.data.get("_sudo"):
        return "a read-only command failed on the host"
    return (
        "a command failed on the host, or sudo is missing or requires a password; fix: run "
        "deploys/bootstrap.py, or set `sudo: false` if you log in as root"
    )


@dataclass(frozen=True, slots=True)
class AccessResult:
    silent: tuple[Seen, ...]
    closed: tuple[Endpoint, ...]  # our key does not log in, or sudo requires a password

    def problems(self) -> Iterator[Problem]:
        for host in self.silent:
            reason = f"{host.entry_name}: {host.detail}"
            yield unreachable(host.endpoint.host, reason, _CHECK_NETWORK)
        for endpoint in self.closed:
            problem = "sudo requires a password"
            if not endpoint.is_local:
                problem = f"rejects our SSH key, or {problem}"
            yield Problem(endpoint.host, problem, _BOOTSTRAP)


def check_access(hosts: Sequence[Target]) -> AccessResult:
    """Try a login on all hosts in parallel; probe those where it fails."""
    endpoints = [login.endpoint(host.name, host.data) for host in hosts]
    doing = f"connecting to {short_list([host.name for host in hosts])}"
    with ticking(doing, note, first_s=QUIET_S), ThreadPoolExecutor(max_workers=16) as pool:
        results = list(pool.map(login.try_key, endpoints))
        pairs = zip(endpoints, results, strict=True)
        closed = [endpoint for endpoint, access in pairs if not access.ready]
        remote = [endpoint for endpoint in closed if not endpoint.is_local]
        seen = list(pool.map(host_keys.look, remote))
    silent = tuple(host for host in seen if host.state == "unreachable")
    unreached = [host.endpoint for host in silent]
    return AccessResult(silent, tuple(endpoint for endpoint in closed if endpoint not in unreached))
