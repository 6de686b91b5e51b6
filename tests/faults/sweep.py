"""Sweeps: every case of a list is tried, and each leaves a row of what was seen.

Rows lie in ``build/sweeps`` as they come, so that a sweep that was ended goes on where it was; the
whole table is written into ``proofs/results/sweeps`` when ``SPARK_SWEEP_RESULTS`` names that
folder. ``SPARK_SWEEP_GUESTS`` says on which guests, side by side; ``SPARK_SWEEP_CASES`` is a
regular expression, for a part of the cases.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from queue import Queue
from typing import TypeVar

from tests.labkit import CHECKOUT, Guest

GUESTS = tuple(os.environ.get("SPARK_SWEEP_GUESTS", "lab-23 lab-24").split())
LAB = "guests of the virtual lab with the stub engine; not a DGX Spark"
PARTS = CHECKOUT / "build" / "sweeps"
MANY = 300
NOTHING = "nothing to send"
CHOSEN = re.compile(os.environ.get("SPARK_SWEEP_CASES", ""))
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """What one case showed; ``wrong`` is empty when everything was as it has to be."""

    group: str
    case: str
    saw: str  # what the owner sees, in one line
    state: str  # of the host afterwards
    wrong: str
    seconds: float = 0.0
    code: str = ""


class Sweep:
    """The rows of one sweep, kept as they come."""

    def __init__(self, name: str) -> None:
        self.path = PARTS / f"{name}.jsonl"
        self.name = name
        self._writing = threading.Lock()
        self.code = _out("git", "-C", str(CHECKOUT), "describe", "--always", "--dirty")

    def rows(self) -> list[Row]:
        """Return the last row of every case."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        found = [Row(**json.loads(line)) for line in lines]
        return list({(row.group, row.case): row for row in found}.values())

    def add(self, row: Row) -> None:
        """Keep a row."""
        with self._writing:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as out:
                out.write(json.dumps(asdict(row)) + "\n")

    def open_cases(self, group: str, cases: Iterable[str]) -> list[str]:
        """Return the cases of a group that have not been tried, or went wrong."""
        well = {row.case for row in self.rows() if row.group == group and not row.wrong}
        return [case for case in cases if case not in well and CHOSEN.search(case)]

    def tried(self, group: str, case: str, one: Callable[[], tuple[str, str]]) -> Row:
        """Try a case, which returns what was seen or raises, and keep its row."""
        began = time.monotonic()
        try:
            saw, state = one()
            wrong = ""
        except Exception as error:  # a row says it, and the sweep goes on
            saw, state, wrong = "", "", f"{type(error).__name__}: {error}"
            if not isinstance(error, AssertionError):
                wrong += "\n" + traceback.format_exc()
        row = Row(group, case, saw, state, wrong, round(time.monotonic() - began, 1), self.code)
        self.add(row)
        return row

    def tried_as_one(
        self, group: str, cases: list[str], all_of_them: Callable[[], list[str]]
    ) -> Row:
        """Try cases that are judged together: each gets the verdict of all, and a word of its own.

        One that had nothing to do is left out. Returns the row of the last one.
        """  # fmt: skip
        said: list[str] = []

        def together() -> tuple[str, str]:
            said.extend(all_of_them())
            return said[-1], f"the last of {len(cases)} in a row"

        last = self.tried(group, cases[-1], together)
        for case, word in zip(cases[:-1], (said or [""] * len(cases))[:-1], strict=True):
            if word != NOTHING:
                self.add(Row(group, case, word, "one of a row", last.wrong, 0.0, self.code))
        return last

    def write(
        self,
        title: str,
        about: dict[str, str],
        guest: Guest | None,
        counted: str,
        test: str = "",
        listed: Iterable[str] = (),
    ) -> None:
        """Write the table, where that was asked for; without a guest it is of no host.

        Args:
            title: of the table.
            about: what each group is about.
            guest: one of those swept.
            counted: what a case is.
            test: the file, where it is not named after the sweep.
            listed: all cases there are, so that the table names those that were not tried.
        """  # fmt: skip
        where = os.environ.get("SPARK_SWEEP_RESULTS")
        if not where:
            return
        rows = sorted(self.rows(), key=lambda row: (list(about).index(row.group), row.case))
        document = {
            "sweep": self.name,
            "title": title,
            "measured_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "command": "SPARK_SWEEP_RESULTS=proofs/results/sweeps python -m pytest "
            + (test or f"tests/faults/test_sweep_{self.name}.py"),
            "machine": {
                "cpus": os.cpu_count(), "arch": platform.machine(),
                "kernel": platform.release(), "load": round(os.getloadavg()[0], 1),
            },
            "versions": versions(guest),
            "stands_in": LAB if guest else "this machine, without a host; not a DGX Spark",
            "counted": counted,
            "groups": about,
            "rows_shown": self.name != "kill",
            "not_tried": sorted(set(listed) - {row.case for row in rows}),
            "tried": {group: tally(rows, group) for group in about},
            # Of hundreds of points that are alike only those that went wrong.
            "rows": [asdict(row) for row in rows if len(rows) < MANY or row.wrong],
        }  # fmt: skip
        path = Path(where) / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


def tally(rows: Iterable[Row], group: str) -> dict[str, int]:
    """Return how many cases of a group were tried, and how many held."""
    here = [row for row in rows if row.group == group]
    return {"cases": len(here), "held": sum(not row.wrong for row in here)}


def versions(guest: Guest | None) -> dict[str, str]:
    """Return what was swept, and on what."""
    ours = {
        "dgx-spark-deploy": _out("git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD"),
        "pyinfra": importlib.metadata.version("pyinfra"),
        "python": platform.python_version(),
    }
    if guest is None:
        return ours
    return {
        **ours,
        "host": guest.run(". /etc/os-release; echo $PRETTY_NAME"),
        "systemd": guest.run("systemctl --version | head -1 | cut -d' ' -f2"),
        "docker": guest.run("docker version -f '{{.Server.Version}}' 2>/dev/null || echo none"),
    }


def _out(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def side_by_side(places: Iterable[T], cases: Iterable[str], one: Callable[[T, str], Row]) -> None:
    """Try the cases on several guests at once, each guest one case at a time."""
    free: Queue[T] = Queue()
    count = 0
    for place in places:
        free.put(place)
        count += 1

    def on_a_free_one(case: str) -> None:
        place = free.get()
        try:
            one(place, case)
        finally:
            free.put(place)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(on_a_free_one, cases))


def all_well(rows: Iterable[Row]) -> None:
    """Insist that no row went wrong.

    Raises:
        AssertionError: with each that did.
    """
    wrong = [f"{row.group}: {row.case}: {row.wrong}" for row in rows if row.wrong]
    if wrong:
        raise AssertionError(f"{len(wrong)} went wrong:\n" + "\n".join(wrong))
