"""Reads what the builder is told to do: FETCH.json and PLAN.json."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from spark_contract import documents
from spark_contract.documents import DocumentError
from spark_contract.orders import BuildPlan, FetchPlan

from spark_checkpoint import RECIPE_VERSION
from spark_checkpoint.errors import InputRefused

_T = TypeVar("_T")


def load_fetch_plan(path: Path) -> FetchPlan:
    """Read and check FETCH.json."""
    return _load(FetchPlan, path)


def load_build_plan(path: Path) -> BuildPlan:
    """Read and check PLAN.json."""
    plan = _load(BuildPlan, path)
    if plan.recipe_version not in (None, RECIPE_VERSION):
        raise InputRefused(
            str(path),
            f"made for recipe version {plan.recipe_version}, this builder has {RECIPE_VERSION}",
            "install the host tools that belong to the plan, or plan again",
        )
    return plan


def _load(kind: type[_T], path: Path) -> _T:
    try:
        return documents.parse(kind, path.read_text("utf-8"))
    except OSError as error:
        raise InputRefused(str(path), f"cannot be read ({error.strerror})", "check it") from error
    except (DocumentError, UnicodeDecodeError, RecursionError) as error:
        raise InputRefused(str(path), str(error), "correct it, or run the deploy again") from error
