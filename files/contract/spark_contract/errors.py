"""Errors that name the place, the problem and the fix."""

from __future__ import annotations

from dataclasses import dataclass

ERROR = "error: "  # prefix of the last line of a failed tool
_FIX = "; fix: "


@dataclass(frozen=True, slots=True)
class Problem:
    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n  fix: {self.fix}"

    @property
    def line(self) -> str:
        """The message that host tools print after ``ERROR``."""
        return f"{self.where}: {self.what}{_FIX}{self.fix}"


def parse_problem(line: str) -> Problem | None:
    if not line.startswith(ERROR):
        return None
    text, _, fix = line.removeprefix(ERROR).partition(_FIX)
    where, _, what = text.partition(": ")
    return Problem(where, what, fix or "see the messages above, then run it again")


class HostToolError(Exception):
    """Ends a host tool, which prints a single line instead of a traceback."""

    def __init__(self, where: str, what: str, fix: str, exit_code: int = 1):
        self.where = where
        self.what = what
        self.fix = fix
        self.exit_code = exit_code
        super().__init__(Problem(where, what, fix).line)
