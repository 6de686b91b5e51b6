"""Under CI a lab test that is skipped or missing fails the run, whichever folder was asked for."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

CHECKOUT = Path(__file__).resolve().parents[3]
CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"
LAB_FOLDERS = ("tests/host", "tests/faults")
RUNS = "def test_{}():\n    pass\n"
SKIPS = "import pytest\ndef test_{}():\n    pytest.skip('no lab here')\n"
SKIPS_ALL = "import pytest\npytest.skip('no lab here', allow_module_level=True)\n"


def run(
    tmp_path: Path, folder: str, text: str, *asked: str, ci: str = "true", plugin: str = "no:xdist"
) -> subprocess.CompletedProcess[str]:
    """Run the rules on a tree with one test in a folder."""
    (tmp_path / "tests" / folder).mkdir(parents=True)
    (tmp_path / "tests/unit").mkdir(exist_ok=True)
    (tmp_path / "tests/unit/test_one.py").write_text(RUNS.format("unit"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n host: lab\n gate: counts\n")
    (tmp_path / "tests/conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / f"tests/{folder}/test_lab.py").write_text(text.format("lab"))
    words = ("pytest", "-q", "-p", "no:cacheprovider", "-p", plugin, *asked)
    env = {**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return forked.run(words, cwd=tmp_path, env=env, ready=["pytest"])


@pytest.mark.parametrize(
    ("folder", "asked"),
    [
        ("host", ["tests/host"]),
        ("faults", ["tests/unit", "tests/faults/test_lab.py"]),
        ("faults", ["tests"]),
    ],
)
@pytest.mark.parametrize("text", [SKIPS, SKIPS_ALL], ids=["a test", "a file"])
def test_a_skipped_lab_test_fails_the_run(
    tmp_path: Path, folder: str, asked: list[str], text: str
) -> None:
    done = run(tmp_path, folder, text, *asked)
    assert done.returncode == 1
    assert "skipped lab tests count as failures here: " in done.stdout


@pytest.mark.parametrize("folder", ["host", "faults"])
def test_a_lab_test_that_got_no_turn_fails_the_run(tmp_path: Path, folder: str) -> None:
    ends = "import pytest\ndef test_{}():\n    pytest.exit('enough', returncode=0)\n"
    done = run(tmp_path, folder, RUNS.format("first") + ends, f"tests/{folder}")
    assert done.returncode != 0
    assert "lab tests run: 1 of 2" in done.stdout


@pytest.mark.parametrize("asked", [[], ["-m", "gate"]], ids=["no test", "none of the gate"])
def test_a_lab_folder_without_a_test_fails_the_run(tmp_path: Path, asked: list[str]) -> None:
    text = RUNS if asked else ""
    done = run(tmp_path, "faults", text, "tests/unit", "tests/faults", *asked)
    assert done.returncode == 1
    assert "lab tests run: 0 of 0" in done.stdout


@pytest.mark.parametrize("ci", ["", "false"])
def test_a_person_may_run_what_they_like(tmp_path: Path, ci: str) -> None:
    assert run(tmp_path, "faults", SKIPS, "tests/faults", ci=ci).returncode == 0


def test_unit_tests_alone_need_no_lab(tmp_path: Path) -> None:
    assert run(tmp_path, "faults", RUNS, "tests/unit").returncode == 0


def test_lab_tests_are_refused_side_by_side(tmp_path: Path) -> None:
    done = run(tmp_path, "host", RUNS, "tests", "-n", "2", ci="", plugin="xdist")
    assert done.returncode == 1
    assert "lab tests share one lab: run them without" in done.stdout
    assert "1 passed, 1 error" in done.stdout


@pytest.mark.slow
def test_every_lab_test_that_is_written_is_collected() -> None:
    """The gate runs few of them: one that no run of pytest finds would be missed by nobody."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *LAB_FOLDERS], cwd=CHECKOUT, capture_output=True, text=True, check=False,
        env={**os.environ, "CI": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    found = {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    written = [
        f"{path.relative_to(CHECKOUT)}::{node.name}"
        for folder in LAB_FOLDERS
        for path in (CHECKOUT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert sorted(written) == sorted(found)
