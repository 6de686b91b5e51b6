"""The computed speed: bytes of a step, held against published figures that it was not fitted on."""

import dataclasses
import json
import types

import pytest

from spark_deploy.cli.plan_text import plan_lines, speed_lines
from spark_deploy.config.catalog.profile import Speculation
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.plan.resolve import pair_of
from spark_deploy.plan.speed import (
    HEADS,
    TOLERANCE,
    experts_touched,
    next_lever,
    speed_of,
    tokens_per_step,
)
from tests.unit.planning.plans import CATALOG, LARGE, plan_of, settings_of, shipped_catalog

SHIPPED = shipped_catalog()
FIGURES = [
    pytest.param(name, figure, id=f"{name}-{figure.value}")
    for name in SHIPPED.profile_names
    for figure in SHIPPED.profile(name, "qwen3.5-122b").published
    if figure.tokens_per_s
]


@pytest.mark.parametrize(("name", "figure"), FIGURES)
def test_a_published_figure_is_met_or_the_page_would_have_to_say_what_is_not_known(name, figure):
    model, profile = SHIPPED.model(figure.model), SHIPPED.profile(name, figure.model)
    found = speed_of(model.architecture, profile, requests=figure.requests).tokens_per_s
    assert found == pytest.approx(figure.tokens_per_s, rel=TOLERANCE)
    if figure.fitted:
        assert found == pytest.approx(figure.tokens_per_s, rel=0.002), "the fit is of these two"


def by_hand_ms(hidden, layers, experts, vocabulary):
    """The plain tree at its first token, from the sizes of config.json, written out once more."""
    int4, gbs = 0.5 + 2 / 128 + 0.5 / 128, 273e6
    routed = layers * 8 * 3 * hidden * experts * int4 / 0.84
    full = layers / 4 * hidden * (2 * 32 * 256 + 2 * 2 * 256 + 32 * 256)
    linear = layers * 3 / 4 * hidden * (2 * 2048 + 3 * 8192 + 128)
    states = layers * 3 / 4 * 2 * (64 * 128 * 128 * 4 + 3 * (2 * 2048 + 8192) * 2) / 0.84
    small = layers * (3 * hidden * experts + 256 * hidden) * 2 / 0.578
    head = vocabulary * hidden * 2 / 0.96
    attention = (full + linear) * int4 / 0.84
    return (routed + attention + states + small + head) / gbs + layers * 0.092


def test_the_step_of_the_plain_tree_is_what_its_sizes_give_by_hand():
    step = speed_of(
        SHIPPED.model("qwen3.5-122b").architecture, SHIPPED.profile("base", "qwen3.5-122b")
    )
    assert step.step_s * 1000 == pytest.approx(by_hand_ms(3072, 48, 1024, 248320), rel=1e-3)


def test_the_shares_of_heads_are_those_of_the_result_file_that_they_name():
    path = CHECKOUT / "proofs/results/gpu/lm-head.json"
    shape = next(one for one in json.loads(path.read_text())["shapes"] if one["inputs"] == 3072)
    floor_us = sum(shape["floors"].values()) / 2  # of the INT8 values
    names = {"keep": ("bf16", 2), "int8-g128": ("marlin", 1), "int8-triton": ("own", 1)}
    for head, (kernel, values) in names.items():
        assert HEADS[head] == pytest.approx(values * floor_us / shape["us"][kernel]["1"], abs=0.03)


def test_more_tokens_touch_more_experts_and_never_more_than_there_are():
    shape = LARGE.architecture
    counts = [experts_touched(shape, tokens) for tokens in (1, 2, 3, 10, 1000)]
    assert counts[0] == pytest.approx(shape.experts_per_token)
    assert counts == sorted(counts)
    assert counts[1] < 2 * counts[0]
    assert counts[-1] <= shape.experts


def test_a_step_yields_its_token_and_the_drafts_that_are_accepted():
    assert tokens_per_step(0) == 1
    assert tokens_per_step(1) == pytest.approx(1.95)
    assert tokens_per_step(2) == pytest.approx(1 + 2 * 0.8, abs=0.005)


def test_a_long_context_costs_time_and_less_of_it_in_a_smaller_cache():
    def at(name, tokens):
        profile = CATALOG.profile(name, "large")
        return speed_of(LARGE.architecture, profile, context_tokens=tokens).tokens_per_s

    assert at("v2", 0) > at("v2", 100_000) > at("v2", 200_000)
    assert at("v2", 0) == at("v2-tq", 0)
    assert at("v2", 200_000) < at("v2-tq", 200_000)


def test_the_next_lever_is_one_that_the_profile_has_not_pulled():
    base, v2 = (CATALOG.profile(name, "large") for name in ("base", "v2"))
    first = next_lever(LARGE, base)
    assert (first.setting, first.gain > 0.2) == ("engine.drafts: 1", True)
    drafting = dataclasses.replace(base, speculation=Speculation(method="mtp", tokens=3))
    assert next_lever(LARGE, drafting).setting == "engine.head: int8-g128"
    assert next_lever(LARGE, v2).setting == "engine.head: int8-triton"
    pulled = dataclasses.replace(v2, head="int8-triton")
    assert next_lever(LARGE, pulled) is None


def shown(profile, **more):
    settings = settings_of(profile=profile, **more)
    text = "\n".join(plan_lines(plan_of(profile=profile, **more), *pair_of(settings, CATALOG)))
    return text.partition("  speed  ")[2]


def test_the_plan_says_a_range_that_it_marks_as_computed_and_where_the_time_goes():
    said = shown("v2")
    assert said.lstrip().startswith("37 to 51 tokens/s for one request")
    assert "not yet measured on a Spark" in said
    assert "routed experts 40%" in said
    assert "in total for 4" in said
    assert "next lever: engine.head: int8-triton" in said


def test_where_no_speed_is_computed_the_plan_says_so():
    portable = dataclasses.replace(CATALOG.profile("v2", "large"), engine_mode="portable")
    text = "\n".join(plan_lines(plan_of(), LARGE, portable))
    assert "tokens/s" not in text
    assert "  speed       not computed for engines without a Spark's kernels\n" in text
    two = types.SimpleNamespace(cluster=types.SimpleNamespace(members=("one", "two")))
    [line] = speed_lines(types.SimpleNamespace(serve=two), LARGE, CATALOG.profile("v2", "large"))
    assert line == "  speed       not computed for 2 Sparks as one server"
