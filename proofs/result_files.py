"""Result files: kinds, origin, rows of single tests, and raw answers of failed rows."""

import datetime
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

CHECKOUT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
QUESTION_KEYS = (
    "kind",
    "length",
    "depth",
    "client",
    "round",
    "place",
    "prompt",
    "tokens",
    "logprobs",
    "unlikely",
)


class Kind(NamedTuple):
    pattern: str
    tests: str
    target: str  # of make
    needs: str = ""


def find_kind(name: str) -> Kind:
    import yaml

    path = CHECKOUT / "proofs/results/kinds.yml"
    for fields in yaml.safe_load(path.read_text("utf-8")):
        if match := re.fullmatch(fields["pattern"], name):
            return Kind(**fields | {"tests": match.expand(fields["tests"])})
    raise ValueError(f"{name}: unknown result file; fix: add the kind to {path}")


def describe_run(device: str, *packages: str) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": read_commit(),
        "device": device,
        "versions": {package: _version_of(package) for package in packages},
    }


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Write a result file; the command of this process is the default."""
    path.parent.mkdir(parents=True, exist_ok=True)
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    command = shlex.join(["python3", "-m", "pytest", test] if test else sys.orig_argv)
    path.write_text(json.dumps({"command": command, **content}, indent=1) + "\n")


def print_rows(rows: list[Row]) -> None:
    for row in rows:
        verdict = {True: "PASS", False: "FAIL", None: "SEEN"}[row["passed"]]
        print(verdict, row["claim"], json.dumps(row["numbers"])[:400])


def read_commit() -> str | None:
    if named := os.environ.get("SPARK_COMMIT"):
        return named
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        result = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return result.stdout.strip() or None


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


ENDING = ".rows.jsonl"


def record_row(out: Path, name: str, claim: str, passed: bool, **numbers: Any) -> None:
    """Append a row to ``NAME.rows.jsonl``: tests may run in several processes."""
    out.mkdir(parents=True, exist_ok=True)
    line = {"claim": claim, "passed": passed, "cases": [], "numbers": numbers}
    print(json.dumps(line))
    with (out / f"{name}{ENDING}").open("a") as file:
        file.write(json.dumps(line) + "\n")


def engines_of(row: Row) -> list[str]:
    """Return the engines of a row; a row without cases is named after its engine."""
    return row["cases"] or [row["claim"].partition(":")[0]]


def failed_engines(rows: list[Row]) -> set[str]:
    return {name for row in rows if row["passed"] is False for name in engines_of(row)}


def describe_engines(results: dict[str, Row], rows: list[Row]) -> dict[str, Row]:
    """Raw answers are included if a row failed."""
    with_answers = failed_engines(rows)
    return {
        name: {
            "options": result["case"]["options"],
            "tree": Path(result["case"]["tree"]).name,
            "plugins": result["case"].get("plugins", "spark"),
            "state": result["state"],
            "load_s": result.get("load_s"),
            "log": sorted({line[:200] for line in result["log_lines"]}),
            **(raw_answers(result) if name in with_answers else {}),
        }
        for name, result in results.items()
    }


def raw_answers(result: Row) -> Row:
    raw: Row = {
        key: _select(result[key]) for key in ("answers", "other_beginning") if result.get(key)
    }
    if result.get("turns"):
        raw["turns"] = [_select(turn["answers"]) for turn in result["turns"]]
    return raw


def _select(answers: list[Row]) -> list[Row]:
    return [{key: answer[key] for key in ("tokens", "text") if key in answer} for answer in answers]


def wrong_answers(result: Row) -> Row:
    wrong = {
        key: [answer for answer in result.get(key, []) if not answer["right"]]
        for key in ("recall", "talks")
    }
    return {
        f"wrong_in_{key}": [
            {name: answer[name] for name in QUESTION_KEYS if name in answer} for answer in answers
        ]
        for key, answers in wrong.items()
        if answers
    }
