"""The engine proofs as tests: one stage of engines each, every judged row must hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch

from proofs import stages

WITHIN_S = os.environ.get("SPARK_GPU_WITHIN_S", "inf")
"""Seconds for the engines of one test, on a machine that is lent for a time."""


def _failed(stage: str, trees: Path, tmp_path: Path, results: Path, at_once: int) -> stages.Rows:
    rows = stages.prove(
        [stage], trees, tmp_path, results, at_once=at_once, within_s=float(WITHIN_S)
    )
    return [row for row in rows if row["passed"] is False]


def test_every_way_of_serving_has_the_numbers_it_should(
    trees: Path, tmp_path: Path, results: Path
) -> None:
    assert _failed("eager", trees, tmp_path, results, 8) == []


def test_damaged_checkpoints_are_refused_by_name(
    trees: Path, tmp_path: Path, results: Path
) -> None:
    assert _failed("refused", trees, tmp_path, results, 8) == []


def test_speculation_heads_and_graphs_answer_alike(
    trees: Path, tmp_path: Path, results: Path
) -> None:
    assert _failed("speculation", trees, tmp_path, results, 6) == []


def test_turboquant_with_drafts_answers_like_one_sequence_alone(
    trees: Path, tmp_path: Path, results: Path
) -> None:
    assert _failed("turboquant", trees, tmp_path, results, 7) == []


def test_one_nan_is_refused_by_name(trees: Path, tmp_path: Path, results: Path) -> None:
    assert _failed("nan", trees, tmp_path, results, 3) == []


def test_target_and_drafter_read_every_tensor(trees: Path, tmp_path: Path, results: Path) -> None:
    assert _failed("names", trees, tmp_path, results, 10) == []


def test_drafts_are_accepted_as_the_model_was_made_for(
    trees: Path, tmp_path: Path, results: Path
) -> None:
    assert _failed("steered", trees, tmp_path, results, 7) == []


def test_profiles_without_the_plugin_answer_alike_with_drafts_and_graphs(
    trees: Path, tmp_path: Path, results: Path
) -> None:
    assert _failed("profiles", trees, tmp_path, results, 6) == []


def test_later_turns_are_found_in_the_cache_and_answered_alike(
    trees: Path, tmp_path: Path, results: Path
) -> None:
    assert _failed("prefixes", trees, tmp_path, results, 8) == []


def test_true_sizes_and_pictures_agree_with_transformers(
    trees: Path, tmp_path: Path, results: Path
) -> None:
    assert _failed("sizes", trees, tmp_path, results, 10) == []


def test_long_prompts_with_drafts_are_answered_as_alone(
    trees: Path, tmp_path: Path, results: Path
) -> None:
    assert _failed("long", trees, tmp_path, results, 3) == []


def test_the_opt_in_head_is_measured_once(trees: Path, tmp_path: Path, results: Path) -> None:
    from proofs.engine import profile_cases

    for path in profile_cases.HEAD_TIMES.values():
        Path(path).unlink(missing_ok=True)
    assert _failed("head-choice", trees, tmp_path, results, 3) == []


def test_every_way_of_serving_is_as_near_to_16_bits_as_its_base(
    quality_trees: Path, tmp_path: Path, results: Path
) -> None:
    assert _failed("quality", quality_trees, tmp_path, results, 8) == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_two_devices_answer_as_one(trees: Path, tmp_path: Path, results: Path) -> None:
    assert _failed("two-gpus", trees, tmp_path, results, 3) == []
