"""Judge which damages of a trained model the questions of the start check see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proofs.judges.answers import Row, row
from proofs.prompts import expected_answers
from proofs.trees.damages import TRAINED

ONLY_BY_HASH = frozenset({"scale-4", "swapped", "swapped-everywhere", "inverted"})
"""The answers stay right; the file hashes differ. With small inputs silu(gate) * up is nearly
silu(up) * gate."""


def judge_damages(results: dict[str, Row], trees: Path) -> list[Row]:
    return [_judge(name, results.get(f"damage-{name}", {}), trees) for name in TRAINED]


def _judge(name: str, result: dict[str, Any], trees: Path) -> Row:
    import tokenizers

    tree = trees / f"tiny-full-head8-{name}"
    tokenizer = tokenizers.Tokenizer.from_file(str(tree / "tokenizer.json"))
    answers = {
        prompt: tokenizer.decode(answer["tokens"])
        for prompt, answer in zip(expected_answers(), result.get("answers", []), strict=False)
    }
    wrong = {
        prompt: answers[prompt][:80]
        for prompt, expected in expected_answers().items()
        if prompt in answers and expected not in answers[prompt]
    }
    seen = bool(wrong)
    expected_seen = name != "intact" and name not in ONLY_BY_HASH
    claim = f"{name} ({TRAINED[name]}): " + (
        "the questions of the start check see it" if expected_seen else "every answer is right"
    )
    passed = len(answers) == len(expected_answers()) and seen is expected_seen
    numbers = {"questions": len(answers), "wrong": len(wrong), "wrong_answers": wrong}
    return row(claim, passed, [f"damage-{name}"], **numbers)
