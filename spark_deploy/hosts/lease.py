"""A lease on a host, so that runs change it in turn: from the first change to the end of a run.

A file in ``/run``: holder, since when, until when (in seconds of the host's own uptime, so that no
clock matters). A run renews it, returns it at the end or when interrupted, and it expires soon
after a killed run. Dry runs and runs without changes take none. Written by shell commands, for
hosts without our tools. Only root can open the lock, because a reader of a file may lock it.
"""

from __future__ import annotations

import atexit
import getpass
import os
import platform
import re
import shlex
import signal
import sys
import time
import uuid
from dataclasses import dataclass, field, replace
from types import FrameType
from weakref import WeakKeyDictionary

import gevent
import pyinfra
from paramiko import SSHException
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.state import BaseStateCallback, State
from pyinfra.context import state as current_state

from spark_deploy.config.errors import Problem, SparkError, unreachable
from spark_deploy.hosts.commands import current_host, shell

LEASE = "/run/spark-deploy.lease"
TTL_S = 180
RENEW_S = 45
_TIMEOUT_S = 60
_SAME_INTERRUPT_S = 3
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CONNECTION_ERRORS = (TimeoutError, OSError, EOFError, SSHException, PyinfraError)


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.@:-]", "_", text)[:64] or "_"


def this_run() -> str:
    """Return the token of this run: machine and process."""
    return f"{_this_machine()}-{os.getpid()}"


def _this_machine() -> str:
    return f"{uuid.getnode():x}"


def holder() -> str:
    """Return the user of this run, for the messages of other runs: ``ann@desk``."""
    return _word(f"{getpass.getuser()}@{platform.node()}")


def take_script(
    path: str, token: str, who: str, over: str | None = None, *, only_look: bool = False
) -> str:
    """Return the script that takes or renews a lease for ``who``, or prints the holder.

    ``over`` is the token of a dead run; ``only_look`` leaves a free lease free.
    """
    lease = shlex.quote(path)
    when_free = "echo free; exit 0" if only_look else ":"
    return f"""set -e; umask 077
exec 9>>{lease}.lock; flock -w 20 9
now=$(cut -d. -f1 /proc/uptime)
have= until=0 since= who=
if [ -f {lease} ]; then read -r have until since who < {lease} || :; fi
case $until in ''|*[!0-9]*) until=0;; esac
if [ "$until" -gt "$now" ] && [ "$have" != {token} ] && [ "$have" != {over or token} ]; then
  echo "held $have $((until - now)) $since $who"; exit 0
fi
{when_free}
if [ "$have" != {token} ]; then since=$(date -u +%Y-%m-%dT%H:%M:%SZ); fi
printf '%s %s %s %s\\n' {token} $((now + {TTL_S})) "$since" {who} > {lease}.new
mv -fT {lease}.new {lease}
echo taken"""


def release_script(path: str, token: str) -> str:
    """Return the script that returns a lease, if it is still this run's."""
    lease = shlex.quote(path)
    return f"""[ -f {lease} ] || exit 0
umask 077; exec 9>>{lease}.lock; flock -w 20 9
read -r have rest < {lease} || :
if [ "$have" = {token} ]; then rm -f {lease} {lease}.lock; fi"""


@dataclass(slots=True)
class _Held:
    looked: bool = False
    requested: bool = False
    taken: bool = False
    renewing: gevent.Greenlet[..., None] | None = field(default=None)


_leases: WeakKeyDictionary[Host, _Held] = WeakKeyDictionary()


class Releases(BaseStateCallback):
    """Returns leases at the end of a run, also of a failed one."""

    @staticmethod
    def when_interrupted(state: State) -> None:
        """End an interrupted run at once with the usual exit, which returns leases.

        By itself pyinfra finishes the current operation, however long, and exits with 0; or
        continues, where the exception of the handler reaches code that drops it.
        """
        main = gevent.get_hub().parent
        ended_s: list[float] = []

        def end(number: int, _: FrameType | None) -> None:
            # A terminal signals every process of the group, and then a parent signals again: that
            # must not prevent the return of a lease.
            if ended_s and time.monotonic() - ended_s[0] < _SAME_INTERRUPT_S:
                return
            ended_s.append(time.monotonic())
            # Python drops handlers at exit: the second signal would become the exit code.
            atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, _INTERRUPTS)
            sys.stderr.write(
                "interrupted: leases are returned; work started on hosts continues, and the next "
                "run finishes it\n"
            )
            state.pool.kill(block=False)
            gevent.kill(main, SystemExit(128 + number))  # type: ignore[arg-type]  # never None

        for number in _INTERRUPTS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # such as by nohup
                signal.signal(number, end)

    @staticmethod
    def host_disconnect(state: State, host: Host) -> None:
        """Return the lease of a host, over the connection that is still open."""
        held = _leases.pop(host, None)
        if held is None or not held.requested:
            return
        if held.renewing is not None:
            held.renewing.kill()
        try:
            _run_script(host, release_script(LEASE, this_run()))
        except _CONNECTION_ERRORS as error:
            host.log(f"the lease was not returned ({type(error).__name__}) and will expire")


def hold_lease(state: State, host: Host) -> None:
    """Call once at the top of a deploy: the first command that changes ``host`` takes a lease."""
    if Releases not in map(type, state.callback_handlers):
        state.add_callback_handler(Releases())  # type: ignore[no-untyped-call]  # pyinfra
        if pyinfra.is_cli:
            Releases.when_interrupted(state)
    _leases.setdefault(state.inventory.get_host(host.name), _Held())


def find_other_run() -> Problem | None:
    """Return another run that changes the current host; checked once per run."""
    current = _current()
    if current is None or current[1].looked or current[1].taken:
        return None
    current[1].looked = True
    return _request(current[0], only_look=True)


def acquire() -> Problem | None:
    """Take the current host's lease before a change, or return the holder."""
    current = _current()
    if current is None or current[1].taken:
        return None
    host, held = current
    held.requested = True  # an interrupt may come before the answer
    if problem := _request(host, only_look=False):
        return problem
    held.taken = True
    if held.renewing is None:
        held.renewing = gevent.spawn(_renew, host, held)
    return None


def _current() -> tuple[Host, _Held] | None:
    """Return the current host and lease; ``None`` where none is needed."""
    if not current_state.is_executing:
        return None
    host = current_host()
    held = _leases.get(host)
    return None if held is None else (host, held)


def _request(host: Host, *, only_look: bool) -> Problem | None:
    try:
        return _try_lease(host, only_look=only_look)
    except SparkError as error:
        problem = error.problems[0]
        return replace(problem, where=f"{host.name}: {problem.where}")
    except _CONNECTION_ERRORS as error:
        return unreachable(f"{host.name}: lease", type(error).__name__)


def _try_lease(host: Host, *, only_look: bool) -> Problem | None:
    answer = _run_script(host, take_script(LEASE, this_run(), holder(), only_look=only_look))
    token, *rest = answer.removeprefix("held ").split(" ")
    if answer.startswith("held ") and _is_dead(token):
        # A killed run of this machine cannot return the lease.
        script = take_script(LEASE, this_run(), holder(), over=token, only_look=only_look)
        answer = _run_script(host, script)
    if answer in ("taken", "free"):
        return None
    if not answer.startswith("held ") or len(rest) != 3:
        fix = "check whether /run is full, and run again"
        return Problem(f"{host.name}: lease", f"could not be taken: {answer[:200]!r}", fix)
    left_s, since, who = map(_word, rest)
    return Problem(
        f"{host.name}: lease",
        f"{who} has been changing this host since {since} (lease expires in {left_s} s)",
        "wait for that run, and run again",
    )


def _is_dead(token: str) -> bool:
    machine, _, process = token.rpartition("-")
    if machine != _this_machine() or not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


def _renew(host: Host, held: _Held) -> None:
    while True:
        gevent.sleep(RENEW_S)
        try:
            answer = _run_script(host, take_script(LEASE, this_run(), holder()))
        except _CONNECTION_ERRORS:
            continue  # a rebooting host, or a lost connection: try again
        held.taken = answer == "taken"  # lost: the next change requests it again


def _run_script(host: Host, script: str) -> str:
    """Run a script as root, next to other commands of the run; return the last line."""
    ok, output = host.run_shell_command(
        shell(script), _timeout=_TIMEOUT_S, _sudo=bool(host.data.get("_sudo"))
    )
    lines = output.stdout_lines if ok else output.output.splitlines()
    return next(reversed(lines), "")
