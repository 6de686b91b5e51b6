"""Results of a pyinfra run: changes, and the longest time without output."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any


@dataclass(frozen=True)
class Silence:
    seconds: float
    after: str


def read_output(lines: IO[str], began: float) -> tuple[str, Silence]:
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
    yield ""


@dataclass
class Run:
    exit_code: int
    document: dict[str, Any]
    stderr: str
    seconds: float
    silence: Silence

    def operations(self, field_name: str, host: str = "") -> list[str]:
        results = (self.document.get("results") or {}).get("operations") or []
        return [
            operation["name"]
            for operation in results
            if (host in operation[field_name] if host else operation.get(field_name))
        ]

    @property
    def changed(self) -> list[str]:
        return self.changed_on("")

    def changed_on(self, host: str) -> list[str]:
        if "operations" not in (self.document.get("results") or {}):
            raise AssertionError(f"no results ({self.exit_code}):\n{self.stderr[-4000:]}")
        return self.operations("success", host)

    def assert_succeeded(self) -> Run:
        """Return the run, so that a test can use the result."""
        if self.exit_code:
            raise AssertionError(
                f"exit code {self.exit_code}, failed {self.failed}:\n{self.stderr[-6000:]}"
            )
        return self

    def assert_unchanged(self) -> Run:
        """Fail unless the run succeeded, had operations, and made no change."""
        changed, failed = self.changed, self.failed
        if self.exit_code or changed or failed or not self.operations("no_change"):
            raise AssertionError(
                f"exit code {self.exit_code}, changed {changed}, failed {failed}:\n"
                f"{self.stderr[-4000:]}"
            )
        return self

    @property
    def failed(self) -> list[str]:
        return self.operations("error")

    @property
    def predicted(self) -> list[str]:
        return [
            operation["name"]
            for operation in self.document.get("plan") or []
            if operation.get("hosts_with_change")
        ]
