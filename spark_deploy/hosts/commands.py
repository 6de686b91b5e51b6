"""Run commands on a host; show progress and reconnect."""

import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import gevent
from paramiko import SSHException
from pyinfra import host, state
from pyinfra.api import Host, StringCommand
from pyinfra.api.exceptions import ConnectError

from spark_deploy.plan.cluster import Wave

T = TypeVar("T")
HEARTBEAT_S = 7.0

_logged: WeakKeyDictionary[Host, set[str]] = WeakKeyDictionary()
_planned_changes: WeakKeyDictionary[Host, set[str]] = WeakKeyDictionary()


def current_host() -> Host:
    return state.inventory.get_host(host.name)


def log(text: str) -> None:
    """Log unless pyinfra only predicts changes."""
    if state.is_executing:
        host.log(text)


def log_once(text: str, color: str | None = None) -> None:
    """Log a message once per run."""
    logged = _logged.setdefault(current_host(), set())
    if text not in logged:
        logged.add(text)
        if color:
            host.log_styled(text, fg=color)
        else:
            host.log(text)


def record_planned_change(change: str) -> None:
    """Record a change while pyinfra predicts changes, so that later operations expect it."""
    if not state.is_executing:
        _planned_changes.setdefault(current_host(), set()).add(change)


def is_planned(change: str) -> bool:
    return not state.is_executing and change in _planned_changes.get(current_host(), ())


def shell(script: str, *, stdin: str | None = None) -> StringCommand:
    arguments: Any = {} if stdin is None else {"_stdin": stdin}
    return StringCommand("sh", "-c", shlex.quote(script), **arguments)


class CommandError(Exception):
    def __init__(self, command: str, output: str):
        self.output = output
        super().__init__(f"{command.splitlines()[0][:120]}\n{output}")


def run(
    host: Host, command: str | StringCommand, *, timeout_s: int = 600, stdin: str | None = None
) -> list[str]:
    """Run a command with the operation's sudo settings; return lines of standard output.

    Raises CommandError.
    """
    inherited = ("_sudo", "_sudo_user", "_sudo_password", "_use_sudo_login", "_env",
                 "_shell_executable")  # fmt: skip
    arguments: dict[str, Any] = {
        key: value
        for key, value in (host.current_op_global_arguments or {}).items()
        if key in inherited and value
    }
    if stdin is not None:
        arguments["_stdin"] = stdin
    if isinstance(command, str):
        command = StringCommand(command)
    try:
        ok, output = host.run_shell_command(command, _timeout=timeout_s, **arguments)
    except (TimeoutError, OSError, SSHException) as error:
        raise CommandError(str(command), f"{type(error).__name__} {error}".strip()) from error
    if not ok:
        raise CommandError(str(command), output.output)
    return output.stdout_lines


@contextmanager
def heartbeat(host: Host, activity: str) -> Iterator[None]:
    """Log activity and elapsed time every few seconds."""
    started = time.monotonic()

    def log_elapsed() -> None:
        while True:
            gevent.sleep(HEARTBEAT_S)
            host.log(f"{activity}: {time.monotonic() - started:.0f} s")

    greenlet = gevent.spawn(log_elapsed)
    try:
        yield
    finally:
        greenlet.kill()


def host_loop(items: Iterable[T]) -> Iterator[T]:
    """Loop over items whose operations differ between hosts.

    pyinfra 3.10 identifies operations by line number, so a plain ``for`` would mix up the hosts.
    """
    yield from host.loop(list(items))  # type: ignore[no-untyped-call]  # untyped in pyinfra


def waves_of_this_host(waves: Iterable[Wave]) -> Iterator[Wave]:
    yield from (wave for wave in host_loop(waves) if host.name in wave)


RECONNECT_TIMEOUT_S = 420  # a reboot takes minutes
_COMMAND_TIMEOUT_S = 60
_MAX_PAUSE_S = 15


class ScriptResult(NamedTuple):
    ok: bool
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return (self.stderr or self.stdout).strip()


def run_script(
    host: Host, script: str, timeout_s: int = _COMMAND_TIMEOUT_S, stdin: str | None = None
) -> ScriptResult:
    """Run a script with the host's sudo settings."""
    ok, output = host.run_shell_command(
        shell(script), _sudo=bool(host.data.get("_sudo")), _timeout=timeout_s, _stdin=stdin
    )
    return ScriptResult(ok, output.stdout, output.stderr)


def run_reconnecting(host: Host, script: str) -> ScriptResult:
    """Run a script; reconnect if the connection is lost.

    Raises ConnectError if the host stays unreachable.
    """
    lost_at, pause_s = None, 1
    with heartbeat(host, "waiting for the host to respond"):
        while lost_at is None or time.monotonic() - lost_at < RECONNECT_TIMEOUT_S:
            try:
                if not host.connected:
                    # Otherwise the next command would use a disconnected client.
                    host.connect(show_errors=False, reason="still waiting", raise_exceptions=True)
                result = run_script(host, script)
                # A lost connection looks like a failed command.
                if result.ok or not is_disconnected(host):
                    return result
                reason = "closed"
            except (TimeoutError, OSError, EOFError, SSHException, ConnectError) as error:
                reason = type(error).__name__
            if lost_at is None:
                host.log(f"connection lost ({reason}); reconnecting")
                lost_at = time.monotonic()
            # Host.disconnect() would run the callbacks for the end of a run, such as the lease's.
            host.connector.disconnect()
            host.connected = False
            gevent.sleep(pause_s)
            pause_s = min(pause_s + 1, _MAX_PAUSE_S)
    raise ConnectError(f"unreachable for {RECONNECT_TIMEOUT_S} s")


def is_disconnected(host: Host) -> bool:
    """Return whether the SSH connection to a host is lost; False for a local host."""
    client = getattr(getattr(host, "connector", None), "client", None)
    if client is None:
        return False
    transport = client.get_transport()
    return transport is None or not transport.is_active()
