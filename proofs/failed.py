"""What a result keeps of single engines: of those that a failed row names their raw answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Row = dict[str, Any]
RAW = ("tokens", "text")
ASKED = ("kind", "length", "depth", "client", "round", "place", "prompt", "tokens")
"""Of an answer of the recall model: what it was asked, where that stood, what it said."""


def named(rows: list[Row]) -> set[str]:
    """Return the engines that failed rows name; a row without engines has the name of one."""
    failed = [row for row in rows if row["passed"] is False]
    return {name for row in failed for name in row["cases"] or [row["claim"].partition(":")[0]]}


def runs(results: dict[str, Row], rows: list[Row], failure: str | None) -> dict[str, Row]:
    """Return what is told of each engine; where judging broke off nothing but answers is left."""
    whole = set(results) if failure else named(rows)
    return {
        name: {
            "options": found["case"]["options"],
            "tree": Path(found["case"]["tree"]).name,
            "plugins": found["case"].get("plugins", "spark"),
            "state": found["state"],
            "load_s": found.get("load_s"),
            "log": sorted({line[:200] for line in found["log_lines"]}),
            **(answers(found) if name in whole else {}),
        }
        for name, found in results.items()
    }


def answers(result: Row) -> Row:
    kept = {key: _raw(result[key]) for key in ("answers", "other_beginning") if result.get(key)}
    if result.get("turns"):
        kept["turns"] = [_raw(turn["answers"]) for turn in result["turns"]]
    return kept


def _raw(found: list[Row]) -> list[Row]:
    return [{key: one[key] for key in RAW if key in one} for one in found]


def wrong(result: Row) -> Row:
    parts = {
        key: [one for one in result.get(key, []) if not one["right"]] for key in ("recall", "talks")
    }
    return {
        f"wrong_in_{key}": [{about: one[about] for about in ASKED if about in one} for one in found]
        for key, found in parts.items()
        if found
    }
