import re
from pathlib import Path
from typing import Any

import yaml

from proofs.judges.answers import Row, row
from proofs.prompts import expected_answers
from proofs.result_files import CHECKOUT
from proofs.trees.damages import TRAINED

RIGHT = "every answer is right"
MORE = "only questions that the start check does not ask are answered wrongly"
CHECK = "questions of the start check are answered wrongly"
VISIBLE = {
    "scale-4-everywhere": CHECK,
    "inverted-layer": MORE,
    "inverted-everywhere": CHECK,
    "one-expert-a-token": CHECK,
}
"""How far a damage is visible; of the others only file hashes tell. With small inputs,
silu(gate) * up is nearly silu(up) * gate."""


def start_check() -> dict[str, str]:
    """Return what the model's start check asks without tools, with the expected pattern."""
    check = yaml.safe_load((CHECKOUT / "catalog/models/lab-tiny.yml").read_text())["check"]
    asked = {item["prompt"]: item["expect"] for item in check["questions"]}
    return asked | {f"Repeat exactly: {text}": re.escape(text) for text in check["copy"]}


def judge_damages(results: dict[str, Row], trees: Path) -> list[Row]:
    return [_judge(name, results.get(f"damage-{name}", {}), trees) for name in TRAINED]


def _judge(name: str, result: dict[str, Any], trees: Path) -> Row:
    import tokenizers

    tree = trees / f"tiny-full-head8-{name}"
    tokenizer = tokenizers.Tokenizer.from_file(str(tree / "tokenizer.json"))
    patterns = {prompt: re.escape(text) for prompt, text in expected_answers().items()}
    patterns |= start_check()
    answers = {
        prompt: tokenizer.decode(answer["tokens"])
        for prompt, answer in zip(expected_answers(), result.get("answers", []), strict=False)
    }
    wrong = {
        prompt: text[:80]
        for prompt, text in answers.items()
        if not re.search(patterns[prompt], text)
    }
    by_check = sum(prompt in wrong for prompt in start_check())
    seen = CHECK if by_check else MORE if wrong else RIGHT
    expected = VISIBLE.get(name, RIGHT)
    return row(
        f"{name} ({TRAINED[name]}): {expected}",
        len(answers) == len(patterns) and seen == expected,
        [f"damage-{name}"],
        questions=len(answers),
        wrong=len(wrong),
        start_check_asks=len(start_check()),
        wrong_of_start_check=by_check,
        wrong_answers=wrong,
    )
