"""The judge of damaged checkpoints: which wrong answers the start check would notice."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from lab.model import vocabulary
from proofs.judges import damages as judge
from proofs.prompts import expected_answers
from proofs.trees.damages import TRAINED

pytestmark = pytest.mark.slow
WRONG = "something else"
ASKED = next(iter(judge.start_check()))
NOT_ASKED = next(prompt for prompt in expected_answers() if prompt not in judge.start_check())


@functools.cache
def tokenizer() -> Any:
    return vocabulary.train(1024)


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    for name in TRAINED:
        (tmp_path / f"tiny-full-head8-{name}").mkdir()
        tokenizer().save(str(tmp_path / f"tiny-full-head8-{name}/tokenizer.json"))
    return tmp_path


def result(*wrong: str) -> dict[str, Any]:
    answers = {prompt: text for prompt, text in expected_answers().items()}
    answers |= dict.fromkeys(wrong, WRONG)
    return {"answers": [{"tokens": tokenizer().encode(text).ids} for text in answers.values()]}


def as_expected() -> dict[str, Any]:
    wrong = {judge.CHECK: [ASKED], judge.MORE: [NOT_ASKED], judge.RIGHT: []}
    return {
        f"damage-{name}": result(*wrong[judge.VISIBLE.get(name, judge.RIGHT)]) for name in TRAINED
    }


def test_damage_detection_proof_passes_with_the_expected_answers(trees: Path) -> None:
    rows = judge.judge_damages(as_expected(), trees)
    assert [row["passed"] for row in rows] == [True] * len(TRAINED)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("intact", [NOT_ASKED]),
        ("inverted-layer", [ASKED]),
        ("inverted-everywhere", []),
        ("scale-4-everywhere", [NOT_ASKED]),
        ("swapped", None),
    ],
)
def test_damage_detection_proof_fails_with_unexpected_answers(
    trees: Path, name: str, wrong: list[str] | None
) -> None:
    answers = {} if wrong is None else result(*wrong)
    rows = judge.judge_damages(as_expected() | {f"damage-{name}": answers}, trees)
    assert [row["cases"] for row in rows if not row["passed"]] == [[f"damage-{name}"]]
