"""Every deliberate error of the project, in three parts: where, what, how to fix.

pyinfra prints subclasses of ``PyinfraError`` without a traceback, so all errors derive from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from pyinfra.api.exceptions import PyinfraError
from spark_contract.errors import Problem as Problem

_Error = TypeVar("_Error", bound="SparkError")


class SparkError(PyinfraError):
    """Base of every error a user can cause; carries all problems found at once."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(["", *(str(problem) for problem in self.problems)]))

    @classmethod
    def one(cls: type[_Error], where: str, what: str, fix: str) -> _Error:
        return cls([Problem(where, what, fix)])


class SettingsError(SparkError):
    """Settings (group_vars, host_vars, --data, --limit) cannot be used as they are."""


class CatalogError(SparkError):
    """A catalog file is malformed or missing."""


class LockError(SparkError):
    """A name is not locked, cannot be locked, or the lock contradicts the hub."""


class PlanError(SparkError):
    """Valid settings that cannot work together (397B on one host, memory that does not fit)."""


def unreachable(
    where: str, reason: str, fix: str = "run again; finished steps stay done"
) -> Problem:
    return Problem(where, f"unreachable: {reason}", fix)
