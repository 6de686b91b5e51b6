"""Fail one host with a message, without ending the run for the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any, ParamSpec

from pyinfra.api.command import FunctionCommand, PyinfraCommand
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.context import host as current_host
from pyinfra.context import state as current_state

from spark_deploy.errors import Problem

P = ParamSpec("P")

Commands = Generator[str | PyinfraCommand, None, None]


def _refuse(state: State, host: Host, text: str) -> bool:
    show(host, text)
    return False


def show(host: Host, text: str, colour: str = "red") -> None:
    """Print a text of several lines under the host's name."""
    for line in text.splitlines():
        host.log_styled(line, fg=colour)


def refuse(*problems: Problem) -> FunctionCommand:
    """Return the command that fails the current host and prints every problem.

    A dry run executes no command, so the problems are printed while predicting as well.
    """
    text = "\n".join(str(problem) for problem in problems)
    if not current_state.is_executing:
        show(current_host, text)
    return FunctionCommand(_refuse, [text], {})


def host_errors(
    body: Callable[P, Generator[Any, None, None]],
) -> Callable[P, Generator[Any, None, None]]:
    """Turn an unexpected exception in an operation body into a failure of its host alone.

    Without this pyinfra 3.10 ends the whole run with a traceback (its ``run_host_op`` only
    contains errors of commands). Stands below ``@operation()``.
    """

    @functools.wraps(body)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> Generator[Any, None, None]:
        try:
            yield from body(*args, **kwargs)
        except PyinfraError:
            raise
        except Exception as error:
            yield refuse(
                Problem(
                    body.__name__,
                    f"{type(error).__name__}: {error}",
                    "this is a defect of dgx-spark-deploy; report it with this message",
                )
            )

    return guarded
