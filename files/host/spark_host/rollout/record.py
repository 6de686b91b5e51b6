"""How a rollout stands and how it ended: one file, rewritten at every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from spark_contract.records import Rollout
from spark_contract.release import Release
from spark_contract.tool import PHASE

from spark_host.rollout.ports import Host
from spark_host.rollout.request import request_of
from spark_host.system.programs import log


class Record:
    """A rollout's record, rewritten at every step; goes on from what a killed run ``left``."""

    def __init__(self, release: Release, host: Host, left: Rollout | None = None):
        self._host = host
        self._path = host.paths.rollout(release.name)
        self._began = host.clock.monotonic()
        self.unwritten: OSError | None = None
        self.data = left or Rollout(
            release=release.name,
            started_at=host.clock.now(),
            boot_id=host.boot_id,
            request=request_of(release.name, host),
            invocation_id=host.invocation_id,
            state="running",
        )

    def set(self, **values: Any) -> None:
        """Change fields and write the file, if that is possible.

        It is for those who look: a disk that fills up must not end a rollout half way.
        """
        self.data = replace(self.data, **values)
        self.unwritten = None
        try:
            self._host.disk.write(self._path, self.data)
        except OSError as error:
            log(f"not written down: {error}")
            self.unwritten = error

    def report(self, text: str) -> None:
        """Show what is going on, in the journal and to whoever polls."""
        log(text)
        self.set(progress=text)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name and time one step."""
        log(f"{PHASE}{name}")
        self.set(phase=name, progress=None)
        start = self._host.clock.monotonic()
        try:
            yield
        finally:
            self._took(name, start)

    def _took(self, name: str, since: float) -> None:
        seconds = round(self._host.clock.monotonic() - since, 3)
        self.data = replace(self.data, times_s={**self.data.times_s, name: seconds})

    def end(self, state: str, serving: str | None) -> None:
        """Write the final state."""
        self._took("total", self._began)
        ended_at = self._host.clock.now()
        self.set(state=state, phase="done", serving=serving, ended_at=ended_at, progress=None)
        reason = self.data.reason
        log(f"{state}: serving {serving or 'nothing'}" + (f"; {reason}" if reason else ""))
