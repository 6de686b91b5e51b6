"""What every operation of ours shares: fail one host only, say why, never fall silent.

An exception in an operation's body ends a pyinfra run for every host, so bodies are wrapped and
failures become a failing command of the one host concerned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, ParamSpec

import gevent
from paramiko import SSHException
from pyinfra.api.command import FunctionCommand, PyinfraCommand, StringCommand
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.context import ctx_host, ctx_state

from spark_deploy.errors import Problem

P = ParamSpec("P")
Commands = Generator[str | PyinfraCommand, None, None]


def host_errors(body: Callable[P, Commands]) -> Callable[P, Commands]:
    """Turn an unexpected exception of an operation's body into a failure of this host."""

    @functools.wraps(body)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> Commands:
        try:
            yield from body(*args, **kwargs)
        except PyinfraError:
            raise
        except Exception as error:
            where = f"{body.__module__.rsplit('.', 1)[-1]}.{body.__name__}"
            yield refuse([Problem(where, f"{type(error).__name__}: {error}", "report this")])

    return guarded


def refuse(problems: Sequence[Problem]) -> FunctionCommand:
    """Build the command that fails this host and shows every problem with its fix.

    A dry run never executes commands, so the problems are shown while predicting as well.
    """
    if not ctx_state.get().is_executing:
        show(ctx_host.get(), problems)
    return FunctionCommand(_fail, [tuple(problems)], {})


def _fail(state: State, host: Host, problems: Sequence[Problem]) -> bool:
    show(host, problems)
    return False


def show(host: Host, problems: Sequence[Problem], colour: str = "red") -> None:
    """Print problems line by line under the host's name."""
    for problem in problems:
        for line in str(problem).splitlines():
            host.log_styled(line, fg=colour)


def say(text: str) -> None:
    """Tell the reader something about the current host; only while executing, so only once."""
    if ctx_state.get().is_executing:
        ctx_host.get().log(text)


class CommandFailed(Exception):  # noqa: N818 - the shell's word
    """A command on the host failed; carries what it printed."""

    def __init__(self, command: str, output: str):
        self.output = output
        super().__init__(f"{command.splitlines()[0][:120]}\n{output}")


def run(
    host: Host, command: str | StringCommand, *, timeout_s: int = 600, stdin: str | None = None
) -> list[str]:
    """Run a command inside a ``FunctionCommand`` with the operation's own sudo settings.

    Returns:
        The lines of standard output.

    Raises:
        CommandFailed: exit status other than 0, a time-out, or a lost connection.
    """
    given = host.current_op_global_arguments or {}
    keep = ("_sudo", "_sudo_user", "_sudo_password", "_use_sudo_login", "_env", "_shell_executable")
    arguments: dict[str, Any] = {key: given[key] for key in keep if given.get(key)}
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
def talking(host: Host, what: str, every_s: float = 10) -> Iterator[None]:
    """Say every few seconds that ``what`` is still going on, so that a run is never silent."""
    started = monotonic()

    def talk() -> None:
        while True:
            gevent.sleep(every_s)
            host.log(f"{what}: {monotonic() - started:.0f} s")

    greenlet = gevent.spawn(talk)
    try:
        yield
    finally:
        greenlet.kill()
