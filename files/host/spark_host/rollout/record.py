"""How a change of release stands and how it ended: one file, rewritten at every step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spark_contract import files
from spark_contract.paths import Paths
from spark_contract.release import Release

from spark_host.engine import serve
from spark_host.rollout import change


class Record:
    """The switch's result file, rewritten at every step.

    Args:
        release: The candidate.
        paths: Where the file goes.
    """

    def __init__(self, release: Release, paths: Paths):
        self._path = paths.switch(release.name)
        self._began = time.monotonic()
        self.unwritten: OSError | None = None
        self.data: dict[str, Any] = {
            "schema_version": 1,
            "release": release.name,
            "service": release.service,
            "state": "running",
            "phase": None,
            "progress": None,
            "reason": None,
            "failed_phase": None,
            "failed_checks": [],
            "log_tail": [],
            "bench": [],
            "previous": None,
            "serving": None,
            "started_at": files.now(),
            "ended_at": None,
            "boot_id": boot_id(),
            # Whose outcome this is: the request that was made, and the unit's run.
            "request": change.request_of(release.name, paths),
            "invocation_id": os.environ.get("INVOCATION_ID"),
            "times_s": {},
        }

    def set(self, **values: Any) -> None:
        """Change fields and write the file, if that is possible.

        It is for those who look: a disk that fills up must not end a change half way.
        """
        self.data.update(values)
        try:
            files.write_json(self._path, self.data)
        except OSError as error:
            serve.say(f"not written down: {error}")
            self.unwritten = error
        else:
            self.unwritten = None

    def tell(self, text: str) -> None:
        """Show what is going on, in the journal and to whoever polls."""
        serve.say(text)
        self.set(progress=text)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name and time one step."""
        serve.say(f"phase={name}")
        self.set(phase=name, progress=None)
        start = time.monotonic()
        try:
            yield
        finally:
            self.data["times_s"][name] = round(time.monotonic() - start, 3)

    def end(self, state: str, serving: str | None) -> None:
        """Write the final state."""
        self.data["times_s"]["total"] = round(time.monotonic() - self._began, 3)
        self.set(state=state, phase="done", serving=serving, ended_at=files.now(), progress=None)
        reason = self.data["reason"]
        serve.say(f"{state}: serving {serving or 'nothing'}" + (f"; {reason}" if reason else ""))


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    with open("/proc/sys/kernel/random/boot_id") as source:
        return source.read().strip()
