"""Draft models of the lab's model: tensors, configuration, checkpoints, judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proofs.drafts import cases, trees
from proofs.engine.profile_cases import profile_cases

KINDS = pytest.mark.parametrize("kind", trees.DRAFTS)
TOKENS = [7, 11, 13, 17, 19, 23]


@KINDS
def test_stored_weights_match_the_described_draft(kind: str) -> None:
    tensors = trees.trained(kind)
    assert {name: values.shape for name, values in tensors.items()} == trees.shapes(kind)
    assert all(np.isfinite(values).all() for values in tensors.values())
    # Norms start at 1 before training.
    assert float(np.abs(tensors["norm.weight"] - 1).max()) > 0.1


def sizes_in(path: Path) -> dict[str, tuple[int, ...]]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: tuple(part["shape"]) for name, part in header.items() if name[0] != "_"}


def test_checkpoints_have_trained_random_and_damaged_drafts(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/tokenizer.json").write_text("{}")
    trees.make_drafts(tmp_path, tmp_path / "target")
    all_options = [case["options"] for case in [*cases.gpu_cases(), *cases.cpu_cases({})]]
    names = {
        options["speculative_config"]["model"]
        for options in all_options
        if "speculative_config" in options
    }
    for name in names:
        kind = name.split("-")[1]
        assert sizes_in(tmp_path / name / "model.safetensors") == trees.shapes(kind)
        assert json.loads((tmp_path / name / "config.json").read_text()) == trees.config(kind)
        assert (tmp_path / name / "tokenizer.json").exists()
    contents = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in names}
    assert len(set(contents.values())) == len(contents)


def run(accepted: int, tokens: list[int] = TOKENS) -> dict[str, Any]:
    answer = {"tokens": tokens, "logprobs": [-0.1] * 6, "margins": [3.0] * 6}
    counters = {"x_num_draft_tokens": 100, "x_num_accepted_tokens": accepted}
    return {"state": "ran", "answers": [answer], "counters": counters, "log_lines": []}


def results() -> dict[str, dict[str, Any]]:
    plain = run(0)
    plain["counters"] = {}
    engines = {cases.PLAIN: plain}
    for case in [*cases.gpu_cases(), *cases.cpu_cases({})]:
        name = case["name"]
        if name.endswith(cases.SPOILT):
            error = f"ValueError: tensors with NaN or infinity: model.{trees.SPOILT_TENSOR}; it"
            engines[name] = {"state": "refused", "error": [error]}
        elif name != cases.PLAIN:
            engines[name] = run(0 if name.endswith(cases.RANDOM) else 60)
    return engines


def failed(given: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        *cases.judge_drafts(given, cases.gpu_cases()),
        *cases.judge_drafts(given, cases.cpu_cases({})),
    ]
    return sorted({row["claim"].split(":")[0] for row in rows if not row["passed"]})


def test_correct_results_pass() -> None:
    assert failed(results()) == []


DIFFERENT = [*TOKENS[:3], 99, *TOKENS[4:]]


@pytest.mark.parametrize(
    ("name", "result"),
    [
        *((f"{kind}-{mode}", run(40)) for kind in trees.DRAFTS for mode in ("eager", "full")),
        ("dflash-random-eager", run(60)),  # acceptance would not measure the draft
        ("dflash-eager", run(60, tokens=DIFFERENT)),
        ("eagle3-full", run(60, tokens=DIFFERENT)),
        ("dflash-random-eager", run(0, tokens=DIFFERENT)),
        ("dflash-eager", {"state": "refused", "error": ["ValueError: no"]}),
        ("dflash-nan-eager", run(60)),
        ("dflash-nan-eager", {"state": "refused", "error": ["NaN in lm_head"]}),
    ],
)
def test_checks_acceptance_answers_and_refusals(name: str, result: dict[str, Any]) -> None:
    assert failed(results() | {name: result}) == [name]


def test_stage_profiles_includes_every_draft_case() -> None:
    names = [case["name"] for case in profile_cases()]
    assert {case["name"] for case in cases.gpu_cases()} < set(names)
    assert names.count(cases.PLAIN) == 1


def test_proof_prompts_are_not_lessons() -> None:
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers", reason="needs transformers")
    from proofs.drafts import training

    prompts = training.proof_prompts()
    assert len(prompts) == 8
    others = training.make_held_out()
    assert {lesson.prompt for lesson in others["asked"]} == prompts
    untaught = {lesson.prompt for part in others.values() for lesson in part}
    assert not untaught & {lesson.prompt for lesson in training.make_lessons()}
