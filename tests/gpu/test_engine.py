"""The engine proofs as tests: one stage of engines each, every judged row must hold."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.gpu import (  # needs torch
    engine_cases,
    engine_judge,
    engine_run,
    profile_cases,
    profile_judge,
)

HUB = os.environ.get("SPARK_GPU_HUB")
"""Hub on disk with the lab's trained model (python3 -m lab.model build --out DIR)."""


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.gpu import trees as maker

    out = tmp_path_factory.mktemp("trees") / "all"
    monkey = [str(out), "--special", *(["--hub", HUB] if HUB else [])]
    old, sys.argv = sys.argv, ["trees", *monkey]
    try:
        maker.main()
    finally:
        sys.argv = old
    return out


def _failed(rows: list[engine_judge.Row]) -> list[engine_judge.Row]:
    return [row for row in rows if row["passed"] is False]


def test_every_way_of_serving_has_the_numbers_it_should(trees: Path, tmp_path: Path) -> None:
    cases = engine_cases.eager_cases()
    first = [case for case in cases if case["name"] in engine_cases.FIRST]
    rest = [case for case in cases if case not in first]
    results = engine_run.run_cases(first, trees, tmp_path)
    results |= engine_run.run_cases(rest, trees, tmp_path, at_once=8)
    assert _failed(engine_judge.judge_eager(results, tmp_path, trees)) == []


def test_damaged_checkpoints_are_refused_by_name(trees: Path, tmp_path: Path) -> None:
    pairs = engine_cases.refused_cases()
    results = engine_run.run_cases([case for case, _ in pairs], trees, tmp_path, at_once=8)
    wanted = {case["name"]: text for case, text in pairs}
    assert _failed(engine_judge.judge_refused(results, wanted)) == []


@pytest.mark.skipif(not HUB, reason="needs SPARK_GPU_HUB: a hub with the lab's trained model")
def test_speculation_heads_and_graphs_answer_alike(trees: Path, tmp_path: Path) -> None:
    results = engine_run.run_cases(
        engine_cases.speculation_cases(), trees, tmp_path, at_once=6, limit_s=900
    )
    assert _failed(engine_judge.judge_speculation(results)) == []


@pytest.mark.skipif(not HUB, reason="needs SPARK_GPU_HUB: a hub with the lab's trained model")
def test_turboquant_with_drafts_answers_like_one_sequence_alone(
    trees: Path, tmp_path: Path
) -> None:
    results = engine_run.run_cases(
        engine_cases.turboquant_cases(), trees, tmp_path, at_once=7, limit_s=900
    )
    assert _failed(engine_judge.judge_turboquant(results)) == []


def test_one_nan_is_refused_by_name(trees: Path, tmp_path: Path) -> None:
    pairs = engine_cases.nan_cases()
    results = engine_run.run_cases([case for case, _ in pairs], trees, tmp_path, at_once=3)
    wanted = {case["name"]: text for case, text in pairs}
    assert _failed(engine_judge.judge_refused(results, wanted)) == []


def test_drafts_are_accepted_as_the_model_was_made_for(trees: Path, tmp_path: Path) -> None:
    cases = profile_cases.steered_cases()
    results = engine_run.run_cases(cases, trees, tmp_path, at_once=7, limit_s=900)
    assert _failed(profile_judge.judge_steered(results, cases)) == []


@pytest.mark.skipif(not HUB, reason="needs SPARK_GPU_HUB: a hub with the lab's trained model")
def test_profiles_without_the_plugin_answer_alike_with_drafts_and_graphs(
    trees: Path, tmp_path: Path
) -> None:
    cases = profile_cases.profile_cases()
    results = engine_run.run_cases(cases, trees, tmp_path, at_once=6, limit_s=900)
    assert _failed(profile_judge.judge_profiles(results)) == []


@pytest.mark.skipif(not HUB, reason="needs SPARK_GPU_HUB: a hub with the lab's trained model")
def test_later_turns_are_found_in_the_cache_and_answered_alike(trees: Path, tmp_path: Path) -> None:
    cases = profile_cases.prefix_cases()
    results = engine_run.run_cases(cases, trees, tmp_path, at_once=6, limit_s=900)
    assert _failed(profile_judge.judge_prefixes(results)) == []


def test_long_prompts_with_drafts_are_answered_as_alone(trees: Path, tmp_path: Path) -> None:
    cases = profile_cases.long_cases()
    results = engine_run.run_cases(cases, trees, tmp_path, at_once=3, limit_s=900)
    assert _failed(profile_judge.judge_long(results)) == []


def test_the_opt_in_head_is_measured_once(trees: Path, tmp_path: Path) -> None:
    Path(profile_cases.HEAD_TIMES).unlink(missing_ok=True)
    cases = profile_cases.head_cases()
    results = engine_run.run_cases(cases, trees, tmp_path, at_once=1)
    assert _failed(profile_judge.judge_heads(results, cases)) == []
