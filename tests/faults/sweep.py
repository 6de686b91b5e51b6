"""Sweeps try every case of a list and record a row for each.

Rows are appended to ``build/sweeps``, so that an interrupted sweep continues. The result file goes
to the folder in ``SPARK_SWEEP_RESULTS``. ``SPARK_SWEEP_GUESTS`` names the guests to use in
parallel, and ``SPARK_SWEEP_CASES`` is a regular expression that selects cases.
"""

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
CASES = re.compile(os.environ.get("SPARK_SWEEP_CASES", ""))
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """The outcome of a case; ``wrong`` is empty if it passed."""

    group: str
    case: str
    saw: str
    state: str
    wrong: str
    seconds: float = 0.0
    code: str = ""


class Sweep:
    def __init__(self, name: str) -> None:
        self.path = PARTS / f"{name}.jsonl"
        self.name = name
        self._writing = threading.Lock()
        self.code = _output_of("git", "-C", str(CHECKOUT), "describe", "--always", "--dirty")

    def rows(self) -> list[Row]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        rows = [Row(**json.loads(line)) for line in lines]
        return list({(row.group, row.case): row for row in rows}.values())

    def add(self, row: Row) -> None:
        with self._writing:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as out:
                out.write(json.dumps(asdict(row)) + "\n")

    def open_cases(self, group: str, cases: Iterable[str]) -> list[str]:
        passed = {row.case for row in self.rows() if row.group == group and not row.wrong}
        return [case for case in cases if case not in passed and CASES.search(case)]

    def run_case(self, group: str, case: str, run: Callable[[], tuple[str, str]]) -> Row:
        began = time.monotonic()
        try:
            saw, state = run()
            wrong = ""
        except Exception as error:
            saw, state, wrong = "", "", f"{type(error).__name__}: {error}"
            if not isinstance(error, AssertionError):
                wrong += "\n" + traceback.format_exc()
        row = Row(group, case, saw, state, wrong, round(time.monotonic() - began, 1), self.code)
        self.add(row)
        return row

    def run_group(
        self, group: str, cases: Iterable[str], hosts: Iterable[T],
        run: Callable[[T, str], tuple[str, str]],
    ) -> None:  # fmt: skip
        def run_case(host: T, case: str) -> Row:
            return self.run_case(group, case, lambda: run(host, case))

        run_in_parallel(hosts, self.open_cases(group, cases), run_case)

    def assert_passed(self, group: str) -> None:
        assert_all_passed(row for row in self.rows() if row.group == group)

    def run_chain(self, group: str, cases: list[str], run: Callable[[], list[str]]) -> Row:
        """Run cases that share a verdict; a case with nothing to send gets no row."""
        outcomes: list[str] = []

        def run_all() -> tuple[str, str]:
            outcomes.extend(run())
            return outcomes[-1], f"the last of {len(cases)} in a row"

        last = self.run_case(group, cases[-1], run_all)
        outcomes = outcomes or [""] * len(cases)
        for case, outcome in zip(cases[:-1], outcomes[:-1], strict=True):
            if outcome != "nothing to send":
                self.add(Row(group, case, outcome, "one of a row", last.wrong, 0.0, self.code))
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
        """Write the result file, if ``SPARK_SWEEP_RESULTS`` is set.

        ``about`` describes each group, ``counted`` a case, and ``listed`` are all cases.
        """
        folder = os.environ.get("SPARK_SWEEP_RESULTS")
        if not folder:
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
            "versions": _versions(guest),
            "stands_in": LAB if guest else "this machine, without a host; not a DGX Spark",
            "counted": counted,
            "groups": about,
            "rows_shown": self.name != "kill",
            "not_tried": sorted(set(listed) - {row.case for row in rows}),
            "tried": {group: _tally(rows, group) for group in about},
            "rows": [asdict(row) for row in rows if len(rows) < MANY or row.wrong],
        }  # fmt: skip
        path = Path(folder) / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


def _tally(rows: Iterable[Row], group: str) -> dict[str, int]:
    of_group = [row for row in rows if row.group == group]
    return {"cases": len(of_group), "held": sum(not row.wrong for row in of_group)}


def _versions(guest: Guest | None) -> dict[str, str]:
    versions = {
        "dgx-spark-deploy": _output_of("git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD"),
        "pyinfra": importlib.metadata.version("pyinfra"),
        "python": platform.python_version(),
    }
    if guest is not None:
        versions |= {
            "host": guest.run(". /etc/os-release; echo $PRETTY_NAME"),
            "systemd": guest.run("systemctl --version | head -1 | cut -d' ' -f2"),
            "docker": guest.run("docker version -f '{{.Server.Version}}' 2>/dev/null || echo none"),
        }
    return versions


def _output_of(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def run_in_parallel(hosts: Iterable[T], cases: Iterable[str], run: Callable[[T, str], Row]) -> None:
    free: Queue[T] = Queue()
    for host in hosts:
        free.put(host)

    def run_on_free_place(case: str) -> None:
        host = free.get()
        try:
            run(host, case)
        finally:
            free.put(host)

    with ThreadPoolExecutor(free.qsize()) as pool:
        list(pool.map(run_on_free_place, cases))


def assert_all_passed(rows: Iterable[Row]) -> None:
    wrong = [f"{row.group}: {row.case}: {row.wrong}" for row in rows if row.wrong]
    if wrong:
        raise AssertionError(f"{len(wrong)} went wrong:\n" + "\n".join(wrong))
