"""The page of the result files: when, where and with which code each was made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from declared import cell

from proofs import code

CHECKOUT = Path(__file__).resolve().parent.parent
RESULTS = CHECKOUT / "benchmarks/results/gpu"
SHOWN = 3
BEFORE = """
What `benchmarks/results/gpu` holds. A result is of one run of one machine; whoever changes the
code that it rests on (`proofs/code.py` says which that is) finds it here as older, until somebody
with such a machine has run it again. Not judged are measurements beside a claim, such as what
somebody else's code does: nothing rests on them. What each file shows: [engine proofs](engine-
proofs.md).
"""


def results_page() -> Iterator[str]:
    """Yield the page."""
    yield "<!-- generated from benchmarks/results/gpu and proofs/code.py by `make docs` -->"
    yield "# Result files"
    yield BEFORE
    yield "| result | made | on | held | not judged | failed | code |"
    yield "|---|---|---|---|---|---|---|"
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text("utf-8"))
        device = str(found.get("device") or "not kept").partition(",")[0]
        verdicts = [row["passed"] for row in found.get("rows", []) if "passed" in row]
        counts = (verdicts.count(True), verdicts.count(None), verdicts.count(False))
        link = f"[{path.name}](../../benchmarks/results/gpu/{path.name})"
        cells = (link, found.get("date") or "not kept", device, *counts, age(path.stem, found))
        yield f"| {' | '.join(cell(str(one)) for one in cells)} |"


def age(name: str, found: dict[str, Any]) -> str:
    """Say whether a result was made with the code of this checkout."""
    if "code" not in found:
        return "older: from before digests were kept"
    other = [Path(path).name for path in code.changed(name, found["code"])]
    if not other:
        return "as here"
    more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
    return f"older: {', '.join(other[:SHOWN])}{more} changed"
