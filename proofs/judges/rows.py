"""Rows of the tables that judges write: a claim, whether it holds, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def row(claim: str, passed: bool, cases: list[str], **numbers: Any) -> Row:
    return {"claim": claim, "passed": bool(passed), "cases": cases, "numbers": numbers}


def attempt(name: str, judgement: Callable[[], Row]) -> Row:
    """Return a row even when a run left nothing to judge: it has failed then."""
    try:
        return judgement()
    except Exception as error:  # one dead engine must not hide the other rows
        return row(name, False, [], judging=f"{type(error).__name__}: {error}"[:300])
