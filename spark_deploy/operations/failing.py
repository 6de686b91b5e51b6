"""Fail one host with a message, without ending the run for the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any, ParamSpec

from pyinfra.api.command import FunctionCommand
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.state import State

from spark_deploy.errors import Problem

P = ParamSpec("P")


def _refuse(state: State, host: Host, text: str) -> bool:
    for line in text.splitlines():
        host.log_styled(line, fg="red")
    return False


def refuse(*problems: Problem) -> FunctionCommand:
    """Return the command that fails the current host and prints every problem."""
    return FunctionCommand(_refuse, ["\n".join(str(problem) for problem in problems)], {})


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
