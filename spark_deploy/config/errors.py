"""Errors that users can cause; each problem has three parts: where, what is wrong, how to fix it.

All derive from ``PyinfraError``, which pyinfra prints without a traceback.
"""

from collections.abc import Sequence
from typing import TypeVar

from pyinfra.api.exceptions import PyinfraError
from spark_contract.errors import Problem as Problem

_Error = TypeVar("_Error", bound="SparkError")


class SparkError(PyinfraError):
    """Base class; an error carries all problems that were found."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(["", *(str(problem) for problem in self.problems)]))

    @classmethod
    def one(cls: type[_Error], where: str, what: str, fix: str) -> _Error:
        return cls([Problem(where, what, fix)])


class SettingsError(SparkError):
    """Invalid settings in group_vars, host_vars or on the command line."""


class CatalogError(SparkError):
    """A catalog file is invalid or missing."""


class LockError(SparkError):
    """A name is not locked or cannot be locked, or the lock contradicts the hub."""


class PlanError(SparkError):
    """Valid settings that do not work together, such as a model that exceeds the memory."""


def unreachable(
    where: str, reason: str, fix: str = "run again; finished steps are skipped"
) -> Problem:
    return Problem(where, f"unreachable: {reason}", fix)
