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
SKIPS = "import pytest\ndef test_{}():\n    pytest.skip('no lab')\n"
SKIPS_ALL = "import pytest\npytest.skip('no lab', allow_module_level=True)\n"
EXITS = "import pytest\ndef test_{}():\n    pytest.exit('enough', returncode=0)\n"


def run(tmp_path, folder, text, *arguments, ci="true", plugin="no:xdist"):
    (tmp_path / "tests" / folder).mkdir(parents=True)
    (tmp_path / "tests/unit").mkdir(exist_ok=True)
    (tmp_path / "tests/unit/test_one.py").write_text(RUNS.format("unit"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n host: lab\n gate: counts\n")
    (tmp_path / "tests/conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / f"tests/{folder}/test_lab.py").write_text(text.format("lab"))
    command = ("pytest", "-q", "-p", "no:cacheprovider", "-p", plugin, *arguments)
    env = {**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return forked.run(command, cwd=tmp_path, env=env, ready=["pytest"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "words", "text"),
    [
        ("host", ["tests/host"], SKIPS),
        ("faults", ["tests/unit", "tests/faults/test_lab.py"], SKIPS_ALL),
        ("faults", ["tests"], SKIPS),
        ("host", ["tests/host"], RUNS.format("first") + EXITS),
        ("faults", ["tests/unit", "tests/faults"], ""),
        ("faults", ["tests/unit", "tests/faults", "-m", "gate"], RUNS),
    ],
    ids=["a test", "a file", "all folders", "not reached", "no test", "none in the gate"],
)
def test_ci_fails_if_a_lab_test_does_not_run(tmp_path, folder, words, text):
    assert run(tmp_path, folder, text, *words).returncode != 0


@pytest.mark.parametrize(
    ("ci", "text", "words"), [("", SKIPS, "tests/faults"), ("true", RUNS, "tests/unit")]
)
def test_lab_tests_may_be_skipped_or_deselected_outside_ci(tmp_path, ci, text, words):
    assert run(tmp_path, "faults", text, words, ci=ci).returncode == 0


@pytest.mark.slow
def test_lab_tests_fail_under_xdist(tmp_path):
    result = run(tmp_path, "host", RUNS, "tests", "-n", "2", ci="", plugin="xdist")
    assert result.returncode == 1
    assert "1 passed, 1 error" in result.stdout


@pytest.mark.slow
def test_every_lab_test_is_collected():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *LAB_FOLDERS], cwd=CHECKOUT, capture_output=True, text=True, check=False,
        env={**os.environ, "CI": ""},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:]
    collected = {line.partition("[")[0] for line in result.stdout.splitlines() if "::" in line}
    written = [
        f"{path.relative_to(CHECKOUT)}::{node.name}"
        for folder in LAB_FOLDERS
        for path in (CHECKOUT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert sorted(written) == sorted(collected)
