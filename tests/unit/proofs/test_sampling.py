"""The chi-square test of sampled answers: it accepts equal and sees other distributions."""

import random

import pytest

from proofs.recall import sampling


@pytest.mark.parametrize(
    ("statistic", "freedom", "expected"),
    [(18.307, 10, 0.05), (23.209, 10, 0.01), (67.505, 50, 0.05), (135.807, 100, 0.01)],
)
def test_chi_square_probabilities_match_published_quantiles(statistic, freedom, expected):
    assert sampling.chance(statistic, freedom) == pytest.approx(expected, rel=0.02)


def answers(seed, count, weights=(5, 3, 1, 1)):
    source = random.Random(seed)
    return {
        name: [
            [source.choices(range(4), weights, k=sampling.TOKENS) for _ in range(count)]
            for _ in range(sampling.PROMPTS)
        ]
        for name in sampling.SETTINGS
    }


@pytest.mark.parametrize("count", [3000, 1000])
def test_equal_distributions_pass_and_a_small_shift_is_detected(count):
    plain = {"case": {"name": "plain"}, "samples": answers(1, 3000)}
    for seed, weights, damaged in ((4, (5, 3, 1, 1), False), (5, (7, 3, 1, 1), True)):
        drafted = {"samples": answers(seed, count, weights)}
        row = sampling.judge_samples("drafted", drafted, plain, damaged=damaged)
        assert row["passed"], row
