"""Errors that users can cause; each problem has three parts: where, what is wrong, how to fix it.

All derive from ``PyinfraError``, which pyinfra prints without a traceback. Text from hosts
and hubs passes ``printable``, which replaces control and invisible characters.
"""

import re
from collections.abc import Sequence
from typing import TypeVar

from pyinfra.api.exceptions import PyinfraError
from spark_contract.tool import Problem as Problem

_Error = TypeVar("_Error", bound="SparkError")


class SparkError(PyinfraError):
    """Base class; an error carries all problems that were found."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(["", *(str(problem) for problem in self.problems)]))

    @classmethod
    def single(cls: type[_Error], where: str, what: str, fix: str) -> _Error:
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


# Control characters except tab, and characters that change the writing direction.
_INVISIBLE = "\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_INVISIBLE}]")
# JSON escapes of these characters, after an even number of backslashes.
_IN_JSON = re.compile(
    r"(?<!\\)((?:\\\\)*)\\(?:u(?:00(?:[01][0-9a-f]|7f|[89][0-9a-f])|20(?:0[ef]|2[89a-e]|6[6-9])|"
    r"feff)|[bfr])",
    re.IGNORECASE,
)
_TAB_OR_NEWLINE = re.compile(r"u000[9a]", re.IGNORECASE)


def printable(text: str) -> str:
    """Replace each control or invisible character with U+FFFD."""
    return _IN_TEXT.sub("\ufffd", text)


def one_line(text: object) -> str:
    """Return the first line of untrusted text without control characters."""
    lines = str(text).strip().splitlines() or ["no reason given"]
    line = printable(lines[0])[:300]
    # ``printable`` does not replace unassigned characters.
    return "".join(char if char.isprintable() else "\ufffd" for char in line)


def without_errno(reason: str) -> str:
    """Return an error message without Python's ``[Errno N]``."""
    return re.sub(r"\[Errno \S+\] ", "", reason)


def printable_output(line: str) -> str:
    """Replace control characters in a line of host output, and their escapes inside JSON."""
    text = printable(line.rstrip("\r\n"))
    return _IN_JSON.sub(_replace_escape, text) if '"' in text else text


def _replace_escape(match: re.Match[str]) -> str:
    escape, backslashes_before = match[0], match[1]
    return escape if _TAB_OR_NEWLINE.search(escape) else f"{backslashes_before}\\ufffd"
