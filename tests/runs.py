"""One run of pyinfra as a test reads it: what it changed, and how long it was silent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any


@dataclass(frozen=True)
class Silence:
    """The longest time for which a command printed nothing, and what it had said before."""

    seconds: float
    after: str


def listened(lines: IO[str], began: float) -> tuple[str, Silence]:
    """Read lines to their end; return the text and the longest pause between two of them."""
    text, longest, last = [], Silence(0.0, ""), (began, "the start")
    for line in _with_end(lines):
        now = time.monotonic()
        if now - last[0] > longest.seconds:
            longest = Silence(now - last[0], last[1])
        last = (now, line.rstrip())
        text.append(line)
    return "".join(text), longest


def _with_end(lines: IO[str]) -> Iterator[str]:
    yield from lines
    yield ""  # the pause before the end counts too


@dataclass
class Run:
    """One run of pyinfra, as its ``--json`` tells it."""

    exit_code: int
    document: dict[str, Any]
    stderr: str
    seconds: float
    silence: Silence

    def operations(self, field_name: str, host: str = "") -> list[str]:
        """Return the operations with a host in a field of the results; with ``host``, that one."""
        results = (self.document.get("results") or {}).get("operations") or []
        return [
            operation["name"]
            for operation in results
            if (host in operation[field_name] if host else operation.get(field_name))
        ]

    @property
    def changed(self) -> list[str]:
        """Names of operations that changed something.

        Raises:
            AssertionError: the run told no results, so nobody knows what it changed.
        """
        return self.changed_on("")

    def changed_on(self, host: str) -> list[str]:
        """Names of operations that changed something on one host."""
        if "operations" not in (self.document.get("results") or {}):
            raise AssertionError(f"no results ({self.exit_code}):\n{self.stderr[-4000:]}")
        return self.operations("success", host)

    def must_have_changed_nothing(self) -> None:
        """Insist that the run went well, found everything as it should be and changed nothing.

        Raises:
            AssertionError: it failed, had nothing to look at, or changed something.
        """
        changed, failed = self.changed, self.failed
        if self.exit_code or changed or failed or not self.operations("no_change"):
            raise AssertionError(
                f"exit code {self.exit_code}, changed {changed}, failed {failed}:\n"
                f"{self.stderr[-4000:]}"
            )

    @property
    def failed(self) -> list[str]:
        """Names of operations that failed."""
        return self.operations("error")

    @property
    def predicted(self) -> list[str]:
        """With ``--dry``: names of operations that would change something."""
        return [
            operation["name"]
            for operation in self.document.get("plan") or []
            if operation.get("hosts_with_change")
        ]
