"""Fail one host with a message, without ending the run for the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Concatenate, NoReturn, ParamSpec

from pyinfra.api.command import FunctionCommand, PyinfraCommand
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.context import host as current_host
from pyinfra.context import state as current_state

from spark_deploy.config.errors import Problem, SettingsError
from spark_deploy.hosts.commands import is_disconnected
from spark_deploy.hosts.facts import FactUnavailable
from spark_deploy.hosts.lease import acquire, find_other_run

P = ParamSpec("P")


Commands = Generator[str | PyinfraCommand, None, None]


def _refuse(state: State, host: Host, text: str) -> bool:
    show(host, text)
    return False


def show(host: Host, text: str, colour: str = "red") -> None:
    """Print a text of several lines under the host's name."""
    for line in text.splitlines():
        host.log_styled(line, fg=colour)


class Refused(Exception):  # noqa: N818 - reads better at the call site
    """What ends the work on one host, and on no other."""

    def __init__(self, *problems: Problem):
        super().__init__("\n".join(str(problem) for problem in problems))


def refuse(where: str, what: str, fix: str) -> NoReturn:
    """Fail the current host, from an operation or from a command of one."""
    raise Refused(Problem(where, what, fix))


def host_command(body: Callable[Concatenate[State, Host, P], bool]) -> Callable[..., bool]:
    """Let the function of a ``FunctionCommand`` refuse its host."""

    @functools.wraps(body)
    def guarded(state: State, host: Host, *args: P.args, **kwargs: P.kwargs) -> bool:
        try:
            return body(state, host, *args, **kwargs)
        except Refused as refused:
            return _refuse(state, host, str(refused))

    return guarded


def _unforeseen(where: str, error: Exception) -> Problem:
    """Put into words what no operation expected: a host that is gone, or a defect of ours."""
    if not isinstance(error, PyinfraError | FactUnavailable):
        fix = "this is a defect of dgx-spark-deploy; report it with this message"
        return Problem(where, f"{type(error).__name__}: {error}", fix)
    lost = is_disconnected(current_host)
    what = "the connection was lost while the host was asked" if lost else str(error)
    return Problem(f"{current_host.name}: {where}", what, "run again; what is done stays done")


def host_errors(
    body: Callable[P, Commands | None],
) -> Callable[P, Commands]:
    """Turn an exception in an operation body into a failure of its host alone.

    Before the first command of a run the host's lease is taken: nothing changes without it.

    Without this pyinfra 3.10 ends the whole run with a traceback (its ``run_host_op`` only
    contains errors of commands), as it does when its last host is lost while it is asked. A dry run
    executes no command, so the text is printed while predicting as well. Stands below
    ``@operation()``.
    """

    @functools.wraps(body)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> Commands:
        try:
            if held := find_other_run():
                raise Refused(held)
            for number, command in enumerate(body(*args, **kwargs) or ()):
                if number == 0 and (held := acquire()):
                    raise Refused(held)
                yield command
        except Exception as error:
            # Wrong settings are wrong for every host, and told in their own words.
            if isinstance(error, SettingsError):
                raise
            if isinstance(error, PyinfraError) and not current_state.is_executing:
                raise
            text = str(error if isinstance(error, Refused) else _unforeseen(body.__name__, error))
            if not current_state.is_executing:
                show(current_host, text)
            yield FunctionCommand(_refuse, [text], {})

    return guarded
