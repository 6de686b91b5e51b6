"""Tokens that sampling or the copy to the CPU got wrong, and requests that wait for others."""

import copy
import math

import pytest

from proofs.judges.answers import TRAINED_NOISE, answers_agree, compare_answers
from proofs.recall import repeats
from proofs.recall.judge import unlikely_steps
from proofs.recall.verdicts import moved_at_most
from proofs.whole import waiting

BLOCK_TOKENS = 2112
MEASURED = {
    "beside": {
        "limited": {"answers": 16, "longest_gap_s": 0.06, "long_prompt_s": 0.6},
        "unlimited": {"answers": 7, "longest_gap_s": 0.2, "long_prompt_s": 0.6},
    },
    "turns": {
        "first": {"cached_tokens": 0, "first_token_s": 0.6},
        "later": {"cached_tokens": 29_568, "first_token_s": 0.13},
        "without cache": {"cached_tokens": 0, "first_token_s": 0.52},
    },
}


def answer(token, likely=274):
    return {"tokens": [token], "steps": [{str(likely): -0.01, "275": -7.0, "3": -7.0}]}


def test_token_other_than_the_most_likely_one_is_reported_with_both_probabilities():
    assert unlikely_steps(answer(274)) == []
    [step] = unlikely_steps(answer(275))
    assert (step["token"], step["logprob"], step["best"]["274"]) == (275, -7.0, -0.01)
    assert unlikely_steps(answer(400))[0]["logprob"] == -math.inf


def test_nan_is_reported_and_counts_as_a_change():
    nan = {"tokens": [275], "steps": [{"275": math.nan, "274": math.nan}]}
    assert len(unlikely_steps(nan)) == 1
    pair = ({"tokens": [275], "logprobs": [math.nan]}, {"tokens": [274], "logprobs": [-0.01]})
    assert moved_at_most([pair]) == math.inf


def test_equally_likely_tokens_are_not_reported():
    tied = {"tokens": [3], "steps": [{"275": -0.7, "3": -0.7}]}
    assert unlikely_steps(tied) == []
    assert len(unlikely_steps({"tokens": [3], "steps": [{"275": -0.7, "3": -0.701}]})) == 1


@pytest.mark.parametrize(
    ("token", "wrong", "passed"), [(274, 0, True), (275, 0, False), (274, 73, False)]
)
def test_wrong_token_or_answer_of_an_engine_fails_only_its_settings(token, wrong, passed):
    unlikely = unlikely_steps(answer(token))
    run = {"talks": 1, "answers": 73, "tokens": 1675, "wrong": 0}
    results = {
        "repeat-both-0": {"repeated": {**run, "suspect": []}},
        "repeat-both-7": {"repeated": {**run, "wrong": wrong, "suspect": [{"unlikely": unlikely}]}},
        "repeat-cache-4": {"repeated": {**run, "suspect": []}},
    }
    rows = {row["claim"].partition(":")[0]: row for row in repeats.judge(results)}
    assert [rows["both"]["passed"], rows["cache"]["passed"]] == [passed, True]
    assert rows["both"]["numbers"]["answers"] == 146
    assert rows["both"]["cases"] == ["repeat-both-0", "repeat-both-7"]


def verdicts(measured):
    return [row["passed"] for row in waiting.judge("agent", measured, BLOCK_TOKENS)]


def test_engine_that_ignores_the_limit_for_long_prompts_fails():
    assert verdicts(MEASURED) == [True, True]
    measured = copy.deepcopy(MEASURED)
    measured["beside"]["limited"]["answers"] = 7
    assert verdicts(measured) == [False, True]
    measured["beside"] = dict.fromkeys(("limited", "unlimited"), MEASURED["beside"]["limited"])
    assert verdicts(measured) == [False, True]


def test_later_turn_that_computes_the_whole_prompt_fails():
    measured = copy.deepcopy(MEASURED)
    measured["turns"]["later"]["cached_tokens"] = 0
    assert verdicts(measured) == [True, False]


def test_first_turn_that_finds_tokens_in_the_cache_fails():
    measured = copy.deepcopy(MEASURED)
    measured["turns"]["first"]["cached_tokens"] = 2112
    assert verdicts(measured) == [True, False]


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_each_gpu_runs_every_combination_of_caching_and_drafts(gpus):
    names = [case["name"] for case in repeats.list_cases(gpus, 8, 1.0)]
    for gpu in range(gpus):
        own = {name.removeprefix("repeat-").rpartition("-")[0] for name in names[gpu::gpus]}
        assert own == set(repeats.WAYS)


def test_nan_fails_the_comparison_of_greedy_answers():
    plain = {"tokens": [274], "logprobs": [-0.01], "margins": [5.0]}
    nan = {**plain, "logprobs": [math.nan]}
    compared = compare_answers({"answers": [plain]}, {"answers": [nan]})
    assert not answers_agree(compared, TRAINED_NOISE)
    assert answers_agree(compare_answers({"answers": [plain]}, {"answers": [plain]}), TRAINED_NOISE)
