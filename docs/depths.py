"""The table of engine-proofs.md of where in a context engines found what, by depth and length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGIN = "<!-- generated from recall-recall.json and recall-turboquant.json by `make docs` -->"
END = "<!-- end of what is generated -->"
RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/results/gpu"
BESIDE = ("recall-16bit", "recall-16bit-full-mtp2", "damage-noise-100")
"""Of the engines with a 16-bit cache: two that have to find it, and one that must not."""
QUARTERS = ("first", "second", "third", "last")


def with_depths(text: str) -> str:
    """Return a text with the table between its marks made anew."""
    before, _, rest = text.partition(BEGIN)
    return "\n".join((before + BEGIN, *_table(), END)) + rest.partition(END)[2]


def _table() -> Iterator[str]:
    rows = [row for row in _read("recall-recall") if row["cases"][0] in BESIDE]
    rows += [row for row in _read("recall-turboquant") if "right_by_depth" in row["numbers"]]
    lengths = sorted({int(one) for row in rows for one in row["numbers"]["right"]})
    quarters = [f"{one} quarter" for one in QUARTERS]
    yield ""
    yield f"| engine | found | {' | '.join((*quarters, *(f'{one:,}' for one in lengths)))} |"
    yield "|---" * (2 + len(quarters) + len(lengths)) + "|"
    for row in rows:
        yield f"| {' | '.join(_cells(row, lengths))} |"
    yield ""


def _read(name: str) -> list[dict[str, Any]]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def _cells(row: dict[str, Any], lengths: list[int]) -> Iterator[str]:
    numbers = row["numbers"]
    yield f"`{row['cases'][0]}`"
    yield f"{numbers['found']['right']} of {numbers['found']['asked']}"
    for quarter in numbers["right_by_depth"]:
        yield "none asked" if quarter is None else f"{quarter:.2f}"
    for length in lengths:
        kinds = numbers["right"].get(str(length))
        shares = [kinds.get(kind) for kind in ("record", "passage")] if kinds else []
        yield ", ".join("none" if one is None else f"{one:.2f}" for one in shares) or "not asked"
