"""Mistakes and states that a person can act on: where, what, how to fix."""

from __future__ import annotations

from dataclasses import dataclass

ERROR = "error: "  # begins the last line of a tool that failed
_FIX = "; fix: "


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: ``where`` it stands, ``what`` is wrong, how to ``fix`` it."""

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n  fix: {self.fix}"

    @property
    def line(self) -> str:
        """The problem in one line, as the tools on a host print it behind ``ERROR``."""
        return f"{self.where}: {self.what}{_FIX}{self.fix}"


def problem_in(line: str) -> Problem | None:
    """Return the problem in a line that a tool on a host printed; ``None`` when it tells none."""
    if not line.startswith(ERROR):
        return None
    text, _, fix = line.removeprefix(ERROR).partition(_FIX)
    where, _, what = text.partition(": ")
    return Problem(where, what, fix or "see above, then run again")


class HostToolError(Exception):
    """A problem that ends a tool on a host; printed as one line, never as a traceback."""

    def __init__(self, where: str, what: str, fix: str, exit_code: int = 1):
        self.where = where
        self.what = what
        self.fix = fix
        self.exit_code = exit_code
        super().__init__(Problem(where, what, fix).line)
