"""The page of the sweeps: what was tried, how often it held, and what an owner sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.docs.declared import cell

CHECKOUT = Path(__file__).resolve().parents[2]
RESULTS = CHECKOUT / "proofs/results/sweeps"
BEFORE = """
A sweep tries every case of a list and keeps a row of each. With
`SPARK_SWEEP_RESULTS=proofs/results/sweeps` its test writes the table anew. None ran on a Spark.

What a host holds (`tests/host_digest.py`) is compared file by file: content, links, modes, owners,
records without times and ids, units, packages, accounts, listeners, images and containers.
"""


def sweeps_page() -> Iterator[str]:
    """Yield the page."""
    yield "<!-- generated from proofs/results/sweeps by `make docs` -->"
    yield "# Sweeps"
    yield BEFORE
    for path in sorted(RESULTS.glob("*.json")):
        yield from _sweep(path, json.loads(path.read_text("utf-8")))


def _sweep(path: Path, found: dict[str, Any]) -> Iterator[str]:
    rows, versions = found["rows"], ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    tried = found["tried"]
    held, cases = (sum(one[what] for one in tried.values()) for what in ("held", "cases"))
    yield from (f"## {found['title']}", "", found["counted"], "")
    link = f"[{path.name}]({path.name})"
    yield (
        f"**{held} of {cases} held.** {link}, {found['measured_at'][:10]}, "
        f"{versions}; {found['stands_in']}."
    )
    yield from ("", "| in | cases | held |", "|---|---|---|")
    for group, about in found["groups"].items():
        cases, held = (tried[group][what] for what in ("cases", "held"))
        yield f"| {cell(group)}: {cell(about)} | {cases or 'not tried yet'} | {held or ''} |"
    if found.get("not_tried"):
        yield f"\nNot tried yet: {', '.join(found['not_tried'])}."
    yield ""
    shown = [row for row in rows if row["saw"] and found["rows_shown"]]
    if shown:
        yield from ("| case | what the owner sees | afterwards |", "|---|---|---|")
        for row in shown:
            after = row["state"] if not row["wrong"] else f"**wrong**: {row['wrong'][:200]}"
            yield f"| {cell(row['case'])} | {cell(row['saw'])} | {cell(after)} |"
        yield ""
