"""The lab's trained model, tested with a second implementation.

Needs root for the engine's own root directory, or SPARK_VLLM_PYTHON: a Python with torch and
transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.model.shape import TINY
from lab.model.weights import read

REPOSITORY = Path(__file__).parents[2]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


def run(place: Path, *words: str) -> str:
    python = os.environ.get("SPARK_VLLM_PYTHON")
    command = [python] if python else [sys.executable, "-m", "lab.engine", "run"]
    environment = {
        **os.environ,
        "SPARK_LAB_ENGINE_BIND": str(place),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(REPOSITORY),
    }
    done = subprocess.run(
        [*command, *words], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    hub = tmp_path_factory.mktemp("trained") / "hub"
    run(hub.parent, "-m", "lab.model", "build", "--out", str(hub))
    output = run(hub.parent, "tests/engine/lab_tiny_reference.py", str(hub))
    return json.loads(output.splitlines()[-1])


def test_decoded_hybrid_answers_lessons(report: dict[str, Any]) -> None:
    assert report["asked"] > 40
    assert report["wrong"] == []


def test_chat_template(report: dict[str, Any]) -> None:
    assert report["same_prompts"]


def test_damage_changes_answers(report: dict[str, Any]) -> None:
    wrong_of_asked = report["damaged"]
    assert len(wrong_of_asked) == 5
    for damage, (wrong, asked) in wrong_of_asked.items():
        assert wrong >= asked / 4, damage


def test_training_recipe(tmp_path: Path) -> None:
    again = tmp_path / "weights.npz"
    run(tmp_path, "-m", "lab.model", "train", "--out", str(again))
    assert read(TINY, again).keys() == read(TINY).keys()
