"""Under CI a lab test that is skipped or missing fails the run, whichever folder was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"
RUNS = "def test_{}():\n    pass\n"
SKIPS = "import pytest\ndef test_{}():\n    pytest.skip('no lab here')\n"


def run(
    tmp_path: Path, folder: str, text: str, *asked: str, ci: str = "true", floor: int = 1
) -> subprocess.CompletedProcess[str]:
    """Run the rules on a tree with one test in a folder, with another floor."""
    (tmp_path / "tests" / folder).mkdir(parents=True)
    (tmp_path / "tests/unit").mkdir(exist_ok=True)
    (tmp_path / "tests/unit/test_one.py").write_text(RUNS.format("unit"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = host: lab\n")
    rules = CONFTEST.read_text().replace("\nLAB_TESTS_FLOOR = ", f"\nLAB_TESTS_FLOOR = {floor}  # ")
    (tmp_path / "tests/conftest.py").write_text(rules)
    (tmp_path / f"tests/{folder}/test_lab.py").write_text(text.format("lab"))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *asked],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "asked"),
    [
        ("host", ["tests/host"]),
        ("faults", ["tests/faults"]),
        ("faults", ["tests/unit", "tests/faults/test_lab.py"]),
        ("faults", ["tests"]),
    ],
)
def test_a_skipped_lab_test_fails_the_run(tmp_path: Path, folder: str, asked: list[str]) -> None:
    done = run(tmp_path, folder, SKIPS, *asked, floor=0)
    assert done.returncode == 1
    assert "skipped lab tests count as failures here" in done.stdout


@pytest.mark.parametrize("folder", ["host", "faults"])
def test_too_few_lab_tests_fail_the_run(tmp_path: Path, folder: str) -> None:
    done = run(tmp_path, folder, RUNS, f"tests/{folder}", floor=2)
    assert done.returncode == 1
    assert "lab tests run: 1 (floor 2)" in done.stdout


def test_a_lab_folder_without_a_test_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "faults", "", "tests/unit", "tests/faults")
    assert done.returncode == 1
    assert "lab tests run: 0 (floor 1)" in done.stdout


@pytest.mark.parametrize("ci", ["", "false"])
def test_a_person_may_run_what_they_like(tmp_path: Path, ci: str) -> None:
    assert run(tmp_path, "faults", SKIPS, "tests/faults", ci=ci, floor=9).returncode == 0


def test_unit_tests_alone_need_no_lab(tmp_path: Path) -> None:
    assert run(tmp_path, "faults", RUNS, "tests/unit", floor=9).returncode == 0


@pytest.mark.parametrize(("folder", "floor"), [("tests/host", 125), ("tests/faults", 153)])
def test_no_lab_test_is_lost_that_the_gate_does_not_run(folder: str, floor: int) -> None:
    """Raise the number with every lab test added."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", folder],
        cwd=CHECKOUT, capture_output=True, text=True, check=False, env={**os.environ, "CI": ""},
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith(f"{folder}/")]
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(set(found)) >= floor
