"""One run at a time changes a host: a lease there, from the first change to the end of the run."""

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
from pyinfra.context import host as current_host
from pyinfra.context import state as current_state

from spark_deploy.config.errors import Problem, SparkError
from spark_deploy.hosts.commands import shell

LEASE = "/run/spark-deploy.lease"


TTL_S = 180


RENEW_S = 45


_TRIES_S = 60


_SAME_INTERRUPT_S = 3


_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_SILENT = (TimeoutError, OSError, EOFError, SSHException, PyinfraError)


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.@:-]", "_", text)[:64] or "_"


def this_run() -> str:
    """Return which run this is: a machine and a process there."""
    return f"{_this_machine()}-{os.getpid()}"


def _this_machine() -> str:
    return f"{uuid.getnode():x}"


def holder() -> str:
    """Return who runs this, as others are told: ``ann@desk``."""
    return _word(f"{getpass.getuser()}@{platform.node()}")


def take_script(
    path: str, token: str, who: str, over: str | None = None, *, only_look: bool = False
) -> str:
    """Return the script that takes or renews a lease, or says who has it.

    Args:
        path: the lease's file.
        token: of this run.
        who: runs it.
        over: token of a run that is known to be dead.
        only_look: leave a free host as it is.
    """
    lease = shlex.quote(path)
    found = "echo free; exit 0" if only_look else ":"
    return f"""set -e; umask 077
exec 9>>{lease}.lock; flock -w 20 9
now=$(cut -d. -f1 /proc/uptime)
have= until=0 since= who=
if [ -f {lease} ]; then read -r have until since who < {lease} || :; fi
case $until in ''|*[!0-9]*) until=0;; esac
if [ "$until" -gt "$now" ] && [ "$have" != {token} ] && [ "$have" != {over or token} ]; then
  echo "held $have $((until - now)) $since $who"; exit 0
fi
{found}
if [ "$have" != {token} ]; then since=$(date -u +%Y-%m-%dT%H:%M:%SZ); fi
printf '%s %s %s %s\\n' {token} $((now + {TTL_S})) "$since" {who} > {lease}.new
mv -fT {lease}.new {lease}
echo taken"""


def release_script(path: str, token: str) -> str:
    """Return the script that gives a lease back, when it is still this run's."""
    lease = shlex.quote(path)
    return f"""[ -f {lease} ] || exit 0
umask 077; exec 9>>{lease}.lock; flock -w 20 9
read -r have rest < {lease} || :
if [ "$have" = {token} ]; then rm -f {lease} {lease}.lock; fi"""


@dataclass(slots=True)
class _Held:
    """What this run knows of its lease on a host."""

    looked: bool = False
    asked: bool = False
    taken: bool = False
    lost_to: str = ""
    renewing: gevent.Greenlet[..., None] | None = field(default=None)


_leases: WeakKeyDictionary[Host, _Held] = WeakKeyDictionary()


class Releases(BaseStateCallback):
    """Gives leases back when a run ends, however it does."""

    @staticmethod
    def when_interrupted(state: State) -> None:
        """Have an interrupted run end at once, and by its usual end, which gives leases back.

        By itself pyinfra finishes the operation that it is in, however long, and exits with 0; or
        goes on, where the exception of its handler falls into code that drops it.
        """
        main = gevent.get_hub().parent
        ended_s: list[float] = []

        def end(number: int, _: FrameType | None) -> None:
            # A terminal tells every process of its group, and then a parent tells it again: that
            # must not come between a host and its lease.
            if ended_s and time.monotonic() - ended_s[0] < _SAME_INTERRUPT_S:
                return
            ended_s.append(time.monotonic())
            # Python lets go of its handlers as it ends: the second signal would be its exit code.
            atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, _INTERRUPTS)
            told = "what runs on a host goes on there, and the next run finishes it"
            sys.stderr.write(f"interrupted: hosts are given back; {told}\n")
            state.pool.kill(block=False)
            gevent.kill(main, SystemExit(128 + number))  # type: ignore[arg-type]  # never None

        for number in _INTERRUPTS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup, say
                signal.signal(number, end)

    @staticmethod
    def host_disconnect(state: State, host: Host) -> None:
        """Give the lease of a host back; the connection is open still."""
        held = _leases.pop(host, None)
        if held is None or not held.asked:
            return
        if held.renewing is not None:
            held.renewing.kill()
        try:
            _run_script(host, release_script(LEASE, this_run()))
        except _SILENT as error:
            host.log(f"its lease was not given back ({type(error).__name__}), it ends by itself")


def hold_lease(state: State, host: Host) -> None:
    """Call once at the top of a deploy: the first command that changes ``host`` takes a lease."""
    if Releases not in map(type, state.callback_handlers):
        state.add_callback_handler(Releases())  # type: ignore[no-untyped-call]  # pyinfra
        if pyinfra.is_cli:
            Releases.when_interrupted(state)
    _leases.setdefault(state.inventory.get_host(host.name), _Held())


def find_other_run() -> Problem | None:
    """Return who changes the current host, once in a run: what one sees meanwhile is half done."""
    if (found := _current()) is None:
        return None
    host, held = found
    if held.looked or held.taken:
        return None
    held.looked = True
    return _request(host, only_look=True)


def acquire() -> Problem | None:
    """Have the current host's lease before something changes; or return who has it."""
    if (found := _current()) is None:
        return None
    host, held = found
    if held.taken and not held.lost_to:
        return None
    held.asked = True  # an interrupt may come before the answer
    if said := _request(host, only_look=False):
        return said
    held.taken, held.lost_to = True, ""
    if held.renewing is None:
        held.renewing = gevent.spawn(_renew, host, held)
    return None


def _current() -> tuple[Host, _Held] | None:
    """Return the current host and what is known of its lease; ``None`` where none is needed."""
    if not current_state.is_executing:
        return None
    host = current_state.inventory.get_host(current_host.name)
    held = _leases.get(host)
    return None if held is None else (host, held)


def _request(host: Host, *, only_look: bool) -> Problem | None:
    try:
        return _try_lease(host, only_look=only_look)
    except SparkError as error:
        problem = error.problems[0]
        return replace(problem, where=f"{host.name}: {problem.where}")
    except _SILENT as error:
        what, fix = f"the host does not answer ({type(error).__name__})", "run again"
        return Problem(f"{host.name}: lease", what, fix)


def _try_lease(host: Host, *, only_look: bool) -> Problem | None:
    answer = _run_script(host, take_script(LEASE, this_run(), holder(), only_look=only_look))
    token, *rest = answer.removeprefix("held ").split(" ")
    if answer.startswith("held ") and _is_dead(token):
        # A run of this machine that was killed cannot give its lease back.
        answer = _run_script(
            host, take_script(LEASE, this_run(), holder(), over=token, only_look=only_look)
        )
    if answer in ("taken", "free"):
        return None
    if not answer.startswith("held ") or len(rest) != 3:
        fix = "look whether /run is full, and run again"
        return Problem(f"{host.name}: lease", f"could not be taken: {answer[:200]!r}", fix)
    left_s, since, who = map(_word, rest)
    return Problem(
        f"{host.name}: lease",
        f"{who} has been changing this host since {since}, and holds it for {left_s} s more",
        "wait until that run has ended, and run again; this one goes no further here",
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
        except _SILENT:
            continue  # a host that reboots, or a line that is down; the next one tries again
        held.lost_to = "" if answer == "taken" else answer


def _run_script(host: Host, script: str) -> str:
    """Run a script as root and return its last line; beside whatever else runs there."""
    ok, output = host.run_shell_command(
        shell(script), _timeout=_TRIES_S, _sudo=bool(host.data.get("_sudo"))
    )
    lines = output.stdout_lines if ok else output.output.splitlines()
    return next(reversed(lines), "")
