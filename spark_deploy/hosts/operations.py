"""Operations that hold a lease on the host, and whose errors fail only that host.

The lease prevents concurrent changes. Its file in ``/run`` contains the run, the expiry (in uptime,
so that clocks do not matter), start and user. A run renews the lease and returns it at the end;
after a kill it expires. Runs without changes take no lease. Shell commands write it, because the
host may lack our tools.
"""

import atexit
import functools
import getpass
import os
import platform
import re
import shlex
import signal
import sys
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import FrameType
from typing import Concatenate, NoReturn, ParamSpec
from weakref import WeakKeyDictionary

import gevent
import pyinfra
from paramiko import SSHException
from pyinfra import state as current_state
from pyinfra.api import BaseStateCallback, FunctionCommand, Host, State, operation
from pyinfra.api.arguments_typed import PyinfraOperation
from pyinfra.api.command import PyinfraCommand
from pyinfra.api.exceptions import PyinfraError

from spark_deploy.config.errors import Problem, SettingsError, unreachable
from spark_deploy.hosts.commands import CommandError, current_host, is_disconnected, run_script
from spark_deploy.hosts.facts import FactUnavailableError
from spark_deploy.hosts.failures import RepeatFailures, describe_serving, read_status, show_failure

P = ParamSpec("P")
Commands = Generator[str | PyinfraCommand, None, None]

LEASE = "/run/spark-deploy.lease"
TTL_S = 180
RENEW_S = 45
_REPEATED_SIGNAL_S = 3
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CONNECTION_ERRORS = (TimeoutError, OSError, EOFError, SSHException, PyinfraError)


def _sanitize(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.@:-]", "_", text)[:64] or "_"


def _this_machine() -> str:
    return f"{uuid.getnode():x}"


def this_run() -> str:
    return f"{_this_machine()}-{os.getpid()}"


def lease_holder() -> str:
    return _sanitize(f"{getpass.getuser()}@{platform.node()}")


def _lock_script(lease: str) -> str:
    """Return a script that locks a file next to the lease, even if another run removes the file."""
    return f"""while :; do
  exec 9>>{lease}.lock; flock -w 20 9
  [ {lease}.lock -ef /proc/self/fd/9 ] && break
done"""


def lease_script(
    path: str, token: str, user: str, dead_token: str | None = None, *, check_only: bool = False
) -> str:
    """Return a script that acquires or renews a lease for ``user``, or prints the holder.

    The script replaces a lease that ``dead_token`` holds. With ``check_only`` it acquires no lease.
    """
    lease = shlex.quote(path)
    if_available = "echo available; exit 0" if check_only else ":"
    return f"""set -e; umask 077
{_lock_script(lease)}
now=$(cut -d. -f1 /proc/uptime)
holder= expires=0 since= user=
if [ -f {lease} ]; then read -r holder expires since user < {lease} || :; fi
case $expires in ''|*[!0-9]*) expires=0;; esac
if [ "$expires" -gt "$now" ] && [ "$holder" != {token} ] &&
  [ "$holder" != {dead_token or token} ]; then
  echo "held $holder $((expires - now)) $since $user"; exit 0
fi
{if_available}
if [ "$holder" != {token} ]; then since=$(date -u +%Y-%m-%dT%H:%M:%SZ); fi
printf '%s %s %s %s\\n' {token} $((now + {TTL_S})) "$since" {user} > {lease}.new
mv -fT {lease}.new {lease}
echo acquired"""


def unlock_script(path: str, token: str) -> str:
    lease = shlex.quote(path)
    return f"""[ -f {lease} ] || exit 0
umask 077
{_lock_script(lease)}
read -r holder rest < {lease} || :
if [ "$holder" = {token} ]; then rm -f {lease} {lease}.lock; fi"""


@dataclass(slots=True)
class _Lease:
    is_checked: bool = False  # whether another run holds it
    is_requested: bool = False
    is_acquired: bool = False
    renewal: "gevent.Greenlet[..., None] | None" = None


_leases: WeakKeyDictionary[Host, _Lease] = WeakKeyDictionary()


class ReturnLeases(BaseStateCallback):
    @staticmethod
    def install_signal_handlers(state: State) -> None:
        """On a signal, end the run at once and release the leases.

        pyinfra alone would finish the current operation and exit 0, or ignore the exception that a
        signal handler raises.
        """
        main = gevent.get_hub().parent
        first_signal_at_s: float | None = None

        def end_run(number: int, _: FrameType | None) -> None:
            nonlocal first_signal_at_s
            # After Ctrl-C, the terminal signals this process, and the parent may do so again.
            if first_signal_at_s is None:
                first_signal_at_s = time.monotonic()
            elif time.monotonic() - first_signal_at_s < _REPEATED_SIGNAL_S:
                return
            # Python removes handlers at exit, so a late signal would change the exit status.
            atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, _INTERRUPTS)
            sys.stderr.write(
                "interrupted: locks released; "
                "work already started on the hosts continues, and the next run picks it up\n"
            )
            state.pool.kill(block=False)
            gevent.kill(main, SystemExit(128 + number))  # type: ignore[arg-type]  # never None

        for number in _INTERRUPTS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, end_run)

    @staticmethod
    def host_disconnect(state: State, host: Host) -> None:
        lease = _leases.pop(host, None)
        if lease is None or not lease.is_requested:
            return
        if lease.renewal is not None:
            lease.renewal.kill()
        try:
            _run_lease_script(host, unlock_script(LEASE, this_run()))
        except _CONNECTION_ERRORS as error:
            host.log(f"could not release the lease ({type(error).__name__}); it will expire")


def hold_lease(state: State, host: Host) -> None:
    """Make the run acquire a lease before its first command that changes ``host``."""
    if ReturnLeases not in map(type, state.callback_handlers):
        for handler in (ReturnLeases(), RepeatFailures()):
            state.add_callback_handler(handler)  # type: ignore[no-untyped-call]  # pyinfra
        if pyinfra.is_cli:
            ReturnLeases.install_signal_handlers(state)
    _leases.setdefault(state.inventory.get_host(host.name), _Lease())


def _current_lease() -> _Lease | None:
    return _leases.get(current_host()) if current_state.is_executing else None


def _other_run_problem() -> Problem | None:
    """Return a problem if another run holds the lease; check only once."""
    lease = _current_lease()
    if lease is None or lease.is_checked or lease.is_acquired:
        return None
    lease.is_checked = True
    return _request_lease(current_host(), check_only=True)


def _acquire_lease() -> None:
    """Acquire the lease if needed; raise HostError if another run holds it."""
    lease = _current_lease()
    if lease is None or lease.is_acquired:
        return
    lease.is_requested = True  # set before the request, which an interrupt may leave unanswered
    if problem := _request_lease(current_host(), check_only=False):
        raise HostError(problem)
    lease.is_acquired = True
    if lease.renewal is None:
        lease.renewal = gevent.spawn(_renew, current_host(), lease)


def _request_lease(host: Host, *, check_only: bool) -> Problem | None:
    """Acquire or check the lease; return a problem if another run holds it."""
    where = f"{host.name}: lease"
    token = this_run()
    try:
        script = lease_script(LEASE, token, lease_holder(), check_only=check_only)
        response = _run_lease_script(host, script)
        other_token, *details = response.removeprefix("held ").split(" ")
        if response.startswith("held ") and _has_ended(other_token):
            # A killed run on this machine left the lease behind.
            script = lease_script(LEASE, token, lease_holder(), other_token, check_only=check_only)
            response = _run_lease_script(host, script)
    except SettingsError as error:  # sudo on this machine needs a password
        return error.problems[0]
    except _CONNECTION_ERRORS as error:
        return unreachable(where, type(error).__name__)
    if response in ("acquired", "available"):
        return None
    if not response.startswith("held ") or len(details) != 3:
        fix = "free space in /run, then retry"
        return Problem(where, f"cannot be acquired: {response[:200]!r}", fix)
    expires_in_s, since, user = map(_sanitize, details)
    message = f"{user} started a change at {since} (lease expires in {expires_in_s} s)"
    return Problem(where, message, "wait for that run to end, then retry")


def _has_ended(token: str) -> bool:
    """Return whether the run with this token has ended; ``False`` if it ran on another machine."""
    machine, _, process = token.rpartition("-")
    if machine != _this_machine() or not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # a process of another user
        pass
    return False


def _renew(host: Host, lease: _Lease) -> None:
    while True:
        gevent.sleep(RENEW_S)
        try:
            response = _run_lease_script(host, lease_script(LEASE, this_run(), lease_holder()))
        except _CONNECTION_ERRORS:
            continue  # the host is rebooting, or the connection is lost: try again
        lease.is_acquired = response == "acquired"  # if not, the next change requests it again


def _run_lease_script(host: Host, script: str) -> str:
    """Return the last line of the output; of stderr if the script fails."""
    result = run_script(host, script)
    output = result.stdout if result.ok else f"{result.stdout}\n{result.stderr}"
    lines = output.splitlines()
    return lines[-1] if lines else ""


def log_lines(host: Host, text: str, color: str = "red") -> None:
    for line in text.splitlines():
        host.log_styled(line, fg=color)


def warn(host: Host, *problems: Problem) -> None:
    for problem in problems:
        log_lines(host, f"warning: {problem}", color="yellow")


class HostError(Exception):
    """Fails this host; the other hosts in the run continue."""

    def __init__(self, *problems: Problem):
        super().__init__("\n".join(str(problem) for problem in problems))


def fail(where: str, message: str, fix: str) -> NoReturn:
    raise HostError(Problem(where, message, fix))


def _report_failure(state: State, host: Host, text: str) -> bool:
    """Show a failure together with the release that the host still serves."""
    headline, *details = text.splitlines()
    if serving := describe_serving(host.name, read_status(host)):
        headline = headline.removeprefix(f"{host.name}: ")
        if not headline.startswith("not "):  # "not changed", "not rebooted"
            headline = f"this deploy failed: {headline}"
        headline = f"{serving}; {headline}"
    show_failure(host, [headline, *details])
    return False


def host_command(body: Callable[Concatenate[State, Host, P], bool]) -> Callable[..., bool]:
    """Decorate the function of a ``FunctionCommand``, so that its errors fail only this host."""

    @functools.wraps(body)
    def guarded(state: State, host: Host, *args: P.args, **kwargs: P.kwargs) -> bool:
        try:
            return body(state, host, *args, **kwargs)
        except HostError as error:
            return _report_failure(state, host, str(error))
        except CommandError as error:
            where = f"{host.name}: {body.__name__}"
            problem = Problem(where, str(error), "run again; finished steps are skipped")
            if is_disconnected(host) or isinstance(error.__cause__, SSHException):
                problem = unreachable(where, "the connection was lost")
            return _report_failure(state, host, str(problem))

    return guarded


def host_operation(body: Callable[P, Commands | None]) -> PyinfraOperation[P]:
    """Make an operation that takes the lease before its first command; errors fail only this host.

    pyinfra 3.10 alone would end the whole run with a traceback. In a dry run, which executes
    nothing, errors are only printed.
    """

    @functools.wraps(body)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> Commands:
        try:
            if problem := _other_run_problem():
                raise HostError(problem)
            for index, command in enumerate(body(*args, **kwargs) or ()):
                if index == 0:  # an operation without commands needs no lease
                    _acquire_lease()
                yield command
        except SettingsError:  # ends the run for all hosts
            raise
        except Exception as error:
            if isinstance(error, PyinfraError) and not current_state.is_executing:
                raise
            is_expected = isinstance(error, HostError)
            text = str(error if is_expected else _describe_error(body.__name__, error))
            if not current_state.is_executing:
                log_lines(current_host(), text)
            yield FunctionCommand(_report_failure, [text], {})

    return operation()(guarded)


def _describe_error(operation: str, error: Exception) -> Problem:
    """Describe an unexpected error: a problem with the host, or a bug in this project."""
    if not isinstance(error, PyinfraError | FactUnavailableError):
        fix = "report this message as a bug in dgx-spark-deploy"
        return Problem(operation, f"{type(error).__name__}: {error}", fix)
    host = current_host()
    where = f"{host.name}: {operation}"
    if is_disconnected(host):
        return unreachable(where, "the connection was lost")
    return Problem(where, str(error), "run again; finished steps are skipped")
