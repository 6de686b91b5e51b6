import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from spark_deploy.cli.plan_text import speed_lines
from spark_deploy.config.catalog.profile import Speculation
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.settings.engine import KvCache
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan import speed
from spark_deploy.plan.kv_cache import hybrid_shape
from spark_deploy.plan.memory import plan_memory
from spark_deploy.plan.resolve import with_drafts
from spark_deploy.plan.speed import (
    HEADS,
    best_speedup,
    compute_speed,
    first_token_s,
    next_turn_s,
)
from tests.unit.planning.plans import CATALOG, LARGE, plan_of, shipped_catalog
from tools.docs import speed_fit

SHIPPED = shipped_catalog()
FIGURES = [
    pytest.param(name, figure, id=f"{name}-{figure.value}")
    for name in SHIPPED.profile_names
    for figure in SHIPPED.profile(name, "qwen3.5-122b").published
    if figure.tokens_per_s
]


@pytest.mark.parametrize(("name", "figure"), FIGURES)
def test_computed_speed_is_close_to_the_published_figure(name, figure):
    model, profile = SHIPPED.model(figure.model), SHIPPED.profile(name, figure.model)
    computed = compute_speed(model.architecture, profile, requests=figure.requests).tokens_per_s
    assert computed == pytest.approx(figure.tokens_per_s, rel=0.1)


def squared_errors():
    total = 0.0
    for name, figure in (parameter.values for parameter in FIGURES):
        shape, profile = (
            SHIPPED.model(figure.model).architecture,
            SHIPPED.profile(name, figure.model),
        )
        computed = compute_speed(shape, profile, requests=figure.requests).tokens_per_s
        total += (computed / figure.tokens_per_s - 1) ** 2
    return total


def test_other_fitted_constants_increase_the_errors(monkeypatch):
    least = squared_errors()
    for change in (0.97, 1.03):
        for owner, name in ((speed, "LAYER_OVERHEAD_S"), (speed, "TURBOQUANT_S"), (HEADS, "keep")):
            with monkeypatch.context() as patch:
                if owner is HEADS:
                    patch.setitem(HEADS, name, change * HEADS[name])
                else:
                    patch.setattr(speed, name, change * getattr(speed, name))
                assert squared_errors() > least


def test_fitted_constants_are_those_of_the_published_figures():
    overhead_s, head = speed_fit.fit(SHIPPED, speed_fit.fitted_figures(SHIPPED))
    assert overhead_s == pytest.approx(speed.LAYER_OVERHEAD_S, rel=0.01)
    assert head == pytest.approx(HEADS["keep"], abs=0.005)


def test_efficiencies_of_quantized_heads_match_the_result_file():
    path = CHECKOUT / "proofs/results/gpu/lm-head.json"
    shapes = json.loads(path.read_text())["shapes"]
    [shape] = [s for s in shapes if (s["rows"], s["inputs"]) == (248320, 3072)]
    floor_us = sum(shape["floors"].values()) / 2
    for head, kernel in {"int8-g128": "marlin", "int8-triton": "own"}.items():
        assert HEADS[head] == pytest.approx(floor_us / shape["us"][kernel]["1"], abs=0.03)


def test_long_contexts_cost_less_with_smaller_cache():
    v2 = CATALOG.profile("v2", "large")

    def speed(dtype, tokens):
        profile = replace(v2, kv_cache=KvCache(dtype=dtype))
        return compute_speed(LARGE.architecture, profile, context_tokens=tokens).tokens_per_s

    assert speed("auto", 0) > speed("auto", 100_000) > speed("auto", 200_000)
    assert speed("auto", 0) == speed("fp8", 0)
    assert speed("auto", 200_000) < speed("fp8", 200_000)


def test_estimated_prompt_speed_is_half_the_published_speed_of_two_sparks():
    model = SHIPPED.model("qwen3.5-122b").architecture
    assert 2048 / first_token_s(model, 2048) == pytest.approx(3382 / 2, rel=0.01)
    routed = 48 * 3072 * (9 * 3 * 1024 + 256)
    full = 12 * 3072 * (2 * 32 * 256 + 2 * 2 * 256 + 32 * 256)
    linear = 36 * 3072 * (2 * 2048 + 3 * 8192 + 128)
    flops = 1000 * (2 * (routed + full + linear) + 4 * 12 * 32 * 256 * (100_000 + 500))
    assert first_token_s(model, 1000, 100_000) == pytest.approx(flops / 2.86e13, rel=0.01)


def test_agent_profile_answers_follow_up_turns_sooner_than_v2():
    agent, v2 = (SHIPPED.profile(name, "qwen3.5-122b") for name in ("agent", "v2"))
    model = SHIPPED.model("qwen3.5-122b").architecture
    turns = [next_turn_s(model, profile, 2112, 130_000, 1000) for profile in (agent, v2)]
    assert 20 * turns[0] < turns[1]
    line = list(speed_lines(plan_of(profile="agent"), LARGE, CATALOG.profile("agent", "large")))[1]
    assert "first token" in line
    assert "130,000" in line


def test_cache_of_agent_profile_holds_four_130k_token_sessions():
    shape = hybrid_shape(
        SHIPPED.model("qwen3.5-122b").architecture, SHIPPED.profile("agent", "qwen3.5-122b")
    )
    memory = plan_memory(
        SHIPPED.model("qwen3.5-122b"), SHIPPED.profile("agent", "qwen3.5-122b"), Settings()
    )
    blocks = memory.kv_cache_bytes // shape.block_bytes
    assert 4 * shape.request_blocks(130_000) < 0.65 * blocks


def test_turboquant_estimate_is_slower_and_covers_only_short_contexts():
    v2 = CATALOG.profile("v2", "large")
    turboquant = replace(v2, kv_cache=KvCache(dtype="turboquant_k8v4"))
    speeds = [compute_speed(LARGE.architecture, p).tokens_per_s for p in (turboquant, v2)]
    assert speeds[0] < speeds[1]
    line, *_ = speed_lines(plan_of(profile="v2-tq"), LARGE, CATALOG.profile("v2-tq", "large"))
    assert "not computed for TurboQuant" in line
    assert "after" not in line


def test_bf16_states_halve_cache_blocks_and_speed_up_steps():
    model, v2 = SHIPPED.model("qwen3.5-122b").architecture, SHIPPED.profile("v2", "qwen3.5-122b")
    bf16 = replace(v2, options={**v2.options, "mamba-ssm-cache-dtype": "bfloat16"})
    # 64 states of 128 x 128, and the convolution's inputs of five tokens, in pages of 2,048 bytes
    # per token, rounded up to 16 tokens.
    blocks = [hybrid_shape(model, profile).block_tokens for profile in (v2, bf16)]
    convolution = 5 * (2 * 16 + 64) * 128 * 2
    states = [-(-(64 * 128 * 128 * size + convolution) // 2048) for size in (4, 2)]
    assert blocks == [-(-tokens // 16) * 16 for tokens in states]
    before, after = (compute_speed(model, profile).step_s for profile in (v2, bf16))
    saved_bytes = 36 * 4 * 64 * 128 * 128 * 2
    assert before - after == pytest.approx(saved_bytes / (0.84 * 273e9), rel=1e-3)


def test_int4_drafter_reduces_bytes_read_per_draft():
    model, v2 = SHIPPED.model("qwen3.5-122b").architecture, SHIPPED.profile("v2", "qwen3.5-122b")
    replaced = 3072 * (2 * 32 * 256 + 2 * 2 * 256 + 32 * 256) + 8 * 3 * 3072 * 1024
    int4 = 0.5 + 2 / 128 + 0.5 / 128
    saved_ms = 2 * replaced * (2 - int4) / 0.84 / 273e6
    before, after = (
        compute_speed(model, replace(v2, drafter=d)).step_s for d in ("keep", "int4-g128")
    )
    assert (before - after) * 1000 == pytest.approx(saved_ms, rel=1e-3)
    small = SHIPPED.model("qwen3.5-35b").architecture
    assert compute_speed(small, v2) == compute_speed(small, replace(v2, drafter="int4-g128"))


def test_speed_estimate_uses_the_draft_schedule():
    def speed(requests, **changes):
        drafts = Speculation(method="mtp", **changes)
        v2 = replace(CATALOG.profile("v2", "large"), speculation=drafts)
        return compute_speed(LARGE.architecture, v2, requests=requests).tokens_per_s

    schedule = ((1, 2, 2), (4, 4, 1))
    for requests, tokens in {1: 2, 2: 2, 3: 2, 4: 1, 9: 1}.items():
        scheduled = speed(requests, tokens=2, num_speculative_tokens_per_batch_size=schedule)
        assert scheduled == speed(requests, tokens=tokens)


def test_suggests_a_speedup_that_the_profile_does_not_use_yet():
    base, v2 = (CATALOG.profile(name, "large") for name in ("base", "v2"))
    speedup = best_speedup(LARGE, base)
    assert (speedup.setting, speedup.gain > 0.2) == ("engine.drafts: 1", True)
    drafting = replace(base, speculation=Speculation(method="mtp", tokens=3))
    assert best_speedup(LARGE, drafting).setting == "engine.head: int8-g128"
    assert best_speedup(LARGE, v2).setting == "engine.head: int8-triton"
    assert best_speedup(LARGE, replace(v2, head="int8-triton")) is None


def test_gain_of_another_draft_keeps_the_other_draft_settings():
    v3 = SHIPPED.profile("v3", "qwen3.5-122b")
    model, one_draft = SHIPPED.model("qwen3.5-122b"), with_drafts(v3, 1)
    speeds = [compute_speed(model.architecture, each).tokens_per_s for each in (one_draft, v3)]
    speedup = best_speedup(model, one_draft)
    assert speedup is not None
    assert speedup.setting == "engine.drafts: 2"
    assert speedup.gain == pytest.approx(speeds[1] / speeds[0] - 1)


def test_cluster_speed_is_not_computed():
    members = SimpleNamespace(release=SimpleNamespace(cluster=SimpleNamespace(members=("a", "b"))))
    [line] = speed_lines(members, LARGE, CATALOG.profile("v2", "large"))
    assert "tokens/s" not in line
