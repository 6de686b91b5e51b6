"""Fail a single host with a message; the run continues on the remaining hosts."""

import functools
from collections.abc import Callable, Generator
from typing import Concatenate, NoReturn, ParamSpec

from pyinfra.api.command import FunctionCommand, PyinfraCommand
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.context import host as current_host
from pyinfra.context import state as current_state

from spark_deploy.config.errors import Problem, SettingsError, unreachable
from spark_deploy.hosts import lease
from spark_deploy.hosts.commands import is_disconnected
from spark_deploy.hosts.facts import FactUnavailable

P = ParamSpec("P")
Commands = Generator[str | PyinfraCommand, None, None]


def _refuse(state: State, host: Host, text: str) -> bool:
    show(host, text)
    return False


def show(host: Host, text: str, colour: str = "red") -> None:
    """Print a text of several lines under the host's name."""
    for line in text.splitlines():
        host.log_styled(line, fg=colour)


def warn(host: Host, *problems: Problem) -> None:
    for problem in problems:
        show(host, f"warning: {problem}", colour="yellow")


class Refused(Exception):  # noqa: N818 - reads better at the call site
    """Stops the work on a single host."""

    def __init__(self, *problems: Problem):
        super().__init__("\n".join(str(problem) for problem in problems))


def refuse(where: str, message: str, fix: str) -> NoReturn:
    raise Refused(Problem(where, message, fix))


def host_command(body: Callable[Concatenate[State, Host, P], bool]) -> Callable[..., bool]:
    """Let the function of a ``FunctionCommand`` refuse the host."""

    @functools.wraps(body)
    def guarded(state: State, host: Host, *args: P.args, **kwargs: P.kwargs) -> bool:
        try:
            return body(state, host, *args, **kwargs)
        except Refused as refused:
            return _refuse(state, host, str(refused))

    return guarded


def _describe(operation: str, error: Exception) -> Problem:
    """Describe an error that no operation handled: a lost host, or a defect of this project."""
    if not isinstance(error, PyinfraError | FactUnavailable):
        fix = "report this message: it is a defect of dgx-spark-deploy"
        return Problem(operation, f"{type(error).__name__}: {error}", fix)
    where = f"{current_host.name}: {operation}"
    if is_disconnected(current_host):
        return unreachable(where, "the connection was lost")
    return Problem(where, str(error), "run again; finished steps stay done")


def host_errors(body: Callable[P, Commands | None]) -> Callable[P, Commands]:
    """Turn an exception in an operation body into a failure of only this host.

    Takes the host's lease before the first command.

    Without this, pyinfra 3.10 stops the whole run with a traceback (``run_host_op`` contains
    only errors of commands), also when the last host is lost while a fact is read. A dry run
    executes no command, so the text is printed while predicting as well. Goes below
    ``@operation()``.
    """

    @functools.wraps(body)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> Commands:
        try:
            if other_run := lease.find_other_run():
                raise Refused(other_run)
            for number, command in enumerate(body(*args, **kwargs) or ()):
                if number == 0 and (other_run := lease.acquire()):
                    raise Refused(other_run)
                yield command
        except Exception as error:
            # Wrong settings are wrong for every host and end the run.
            if isinstance(error, SettingsError):
                raise
            if isinstance(error, PyinfraError) and not current_state.is_executing:
                raise
            text = str(error if isinstance(error, Refused) else _describe(body.__name__, error))
            if not current_state.is_executing:
                show(current_host, text)
            yield FunctionCommand(_refuse, [text], {})

    return guarded
