"""The page that lists the result files: what each shows, its device, date, commit and command."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proofs.result_files import find_kind
from tools.docs.declared import cell

CHECKOUT = Path(__file__).resolve().parents[2]
RESULTS = CHECKOUT / "proofs/results"
FOLDERS = {"gpu": "CUDA machines", "cpu": "Machines without a GPU"}
BEFORE = """
One file per run. A result describes the code of its commit, on its device, with its package
versions: compare the date with `git log` before you rely on it. Results of 2026-11-23 and earlier
name the commit that added the file; later ones the commit that ran (`-dirty`: with changes that
were not committed). Counts are claims that passed, failed, or were only measured.

`make gpu-all` writes every file of a CUDA machine into `SPARK_GPU_RESULTS`, `make cpu-all` those
of a machine without a GPU into `build/cpu/results`; `make gpu-train` trains the recall model again
and stays apart, because other weights change other results. A test whose requirement is missing is
skipped with that reason. What the results mean: [engine proofs](../engine-proofs.md).
"""


def results_page() -> Iterator[str]:
    """Yield the page."""
    yield "<!-- generated from proofs/results by `make docs` -->"
    yield "# Results"
    yield BEFORE
    for folder, title in FOLDERS.items():
        yield from (f"## {title}", "")
        yield "| result | shows | device | date | commit | passed, failed, measured | command |"
        yield "|---|---|---|---|---|---|---|"
        for path in sorted((RESULTS / folder).glob("*.json")):
            cells = _cells(path, json.loads(path.read_text("utf-8")))
            yield f"| {' | '.join(map(cell, cells))} |"
        yield ""


def _cells(path: Path, result: dict[str, Any]) -> tuple[str, ...]:
    kind = find_kind(path.stem)
    verdicts = [row["passed"] for row in result.get("rows", []) if "passed" in row]
    counts = ", ".join(str(verdicts.count(verdict)) for verdict in (True, False, None))
    return (
        f"[{path.stem}]({path.relative_to(RESULTS)})",
        kind.shows,
        _device(result),
        result["date"],
        f"`{result['commit']}`",
        counts,
        f"`make {kind.target}`" + (f"; needs {kind.needs}" if kind.needs else ""),
    )


def device_of(name: str) -> str:
    """Return the short name of what a result was measured on, such as H100."""
    [path] = RESULTS.glob(f"[gc]pu/{name}")
    device = _device(json.loads(path.read_text("utf-8")))
    return next((word for word in device.split() if re.match(r"[A-Z]+\d", word)), device)


def _device(result: dict[str, Any]) -> str:
    return str(result["device"]).partition(",")[0].partition("\n")[0]
