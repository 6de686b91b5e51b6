"""Run commands on a host, with progress and reconnects."""

import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
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
_predicted: WeakKeyDictionary[Host, set[str]] = WeakKeyDictionary()


def current_host() -> Host:
    """Return the current host; ``host`` is a proxy for all hosts."""
    return state.inventory.get_host(host.name)


def log(text: str) -> None:
    """Log while executing, not in the prediction before."""
    if state.is_executing:
        host.log(text)


def log_once(text: str, colour: str | None = None) -> None:
    """Log once in a run, in the prediction if there is one (not with ``-y``)."""
    logged = _logged.setdefault(current_host(), set())
    if text not in logged:
        logged.add(text)
        host.log_styled(text, fg=colour) if colour else host.log(text)


def predict(change: str) -> None:
    """Note a predicted ``change``, so that later operations do not predict it again."""
    if not state.is_executing:
        _predicted.setdefault(current_host(), set()).add(change)


def is_predicted(change: str) -> bool:
    """Whether an earlier operation predicted ``change``."""
    return not state.is_executing and change in _predicted.get(current_host(), ())


def shell(script: str, *, stdin: str | None = None) -> StringCommand:
    more: Any = {} if stdin is None else {"_stdin": stdin}
    return StringCommand("sh", "-c", shlex.quote(script), **more)


class CommandFailed(Exception):  # noqa: N818 - the shell's word
    def __init__(self, command: str, output: str):
        self.output = output
        super().__init__(f"{command.splitlines()[0][:120]}\n{output}")


def run(
    host: Host, command: str | StringCommand, *, timeout_s: int = 600, stdin: str | None = None
) -> list[str]:
    """Run a command with the operation's sudo settings; return lines of standard output.

    Raises CommandFailed on another exit status than 0, time-out or lost connection.
    """
    operation_arguments: dict[str, Any] = dict(host.current_op_global_arguments or {})
    keep = ("_sudo", "_sudo_user", "_sudo_password", "_use_sudo_login", "_env", "_shell_executable")
    arguments: dict[str, Any] = {
        key: operation_arguments[key] for key in keep if operation_arguments.get(key)
    }
    if stdin is not None:
        arguments["_stdin"] = stdin
    wrapped = command if isinstance(command, StringCommand) else StringCommand(command)
    try:
        ok, output = host.run_shell_command(wrapped, _timeout=timeout_s, **arguments)
    except (TimeoutError, OSError, SSHException) as error:
        raise CommandFailed(str(wrapped), f"{type(error).__name__} {error}".strip()) from error
    if not ok:
        raise CommandFailed(str(wrapped), output.output)
    return output.stdout_lines


@contextmanager
def heartbeat(host: Host, activity: str) -> Iterator[None]:
    started = time.monotonic()

    def beat() -> None:
        while True:
            gevent.sleep(HEARTBEAT_S)
            host.log(f"{activity}: {time.monotonic() - started:.0f} s")

    greenlet = gevent.spawn(beat)
    try:
        yield
    finally:
        greenlet.kill()


def each(items: Iterable[T]) -> Iterator[T]:
    """Yield items so that pyinfra tells their operations apart by position.

    pyinfra 3.10 identifies operations by line numbers: a plain ``for`` mixes those of hosts.
    """
    yield from host.loop(list(items))  # type: ignore[no-untyped-call]  # untyped in pyinfra


def in_waves(waves: Iterable[Wave]) -> Iterator[Wave]:
    """Yield this host's wave in turn: an operation for each wave, in order."""
    yield from (wave for wave in each(waves) if host.name in wave)


RECONNECT_TIMEOUT_S = 420  # a reboot takes minutes
_COMMAND_TIMEOUT_S = 60
_LONGEST_PAUSE_S = 15


def run_reconnecting(host: Host, script: str) -> tuple[bool, str, str]:
    """Run ``script``, reconnecting if needed; return success, output and errors.

    Uses sudo as set for the host. Raises ConnectError if the host stays away.
    """
    lost_at, pause_s = None, 1
    with heartbeat(host, "waiting for the host to answer"):
        while lost_at is None or time.monotonic() - lost_at < RECONNECT_TIMEOUT_S:
            try:
                if not host.connected:
                    # Otherwise the next command would use a client without connection.
                    host.connect(show_errors=False, reason="still waiting", raise_exceptions=True)
                ok, output = host.run_shell_command(
                    shell(script), _sudo=host.data.get("_sudo", False), _timeout=_COMMAND_TIMEOUT_S
                )
                # A lost connection looks like a failed command.
                if ok or not is_disconnected(host):
                    return ok, output.stdout, output.stderr
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
            pause_s = min(pause_s + 1, _LONGEST_PAUSE_S)
    raise ConnectError(f"unreachable for {RECONNECT_TIMEOUT_S} s")


def is_disconnected(host: Host) -> bool:
    """Whether the SSH connection to a host is lost."""
    client = getattr(getattr(host, "connector", None), "client", None)
    if client is None:
        return False
    transport = client.get_transport()
    return transport is None or not transport.is_active()
