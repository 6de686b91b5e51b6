import pytest

from spark_deploy.catalog import load_guard_rails
from spark_deploy.plan.check import check_pair
from spark_deploy.plan.guard_rails import apply_rails
from spark_deploy.settings import load_hosts


def problems(tmp_path, **overrides):
    found = load_hosts({"spark": ["a"]}, root=tmp_path, overrides=overrides)
    return [problem.what for problem in check_pair(found["a"].settings)]


CALM = {
    "model": "m",
    "profile": "p",
    "kv_cache": "auto",
    "speculation_tokens": 0,
    "prefix_caching": False,
    "max_sequences": 4,
    "max_batched_tokens": 8192,
    "memory_fraction": 0.85,
    "block_tokens": 2096,
    "attention_backend": None,
    "has_attention_backend": False,
    "eager": False,
    "piecewise_graphs": False,
}
TRIPS = {
    "turboquant-with-drafts": {"kv_cache": "turboquant_k8v4", "speculation_tokens": 2},
    "turboquant-with-several-sequences": {"kv_cache": "turboquant_k8v4", "max_sequences": 2},
    "turboquant-with-prefix-caching": {
        "kv_cache": "turboquant_k8v4",
        "max_sequences": 1,
        "prefix_caching": True,
    },
    "turboquant-with-attention-backend": {
        "kv_cache": "turboquant_k8v4",
        "max_sequences": 1,
        "has_attention_backend": True,
    },
    "turboquant-three-bit-keys": {"kv_cache": "turboquant_3bit_nc", "max_sequences": 1},
    "drafts-with-prefix-caching": {"speculation_tokens": 2, "prefix_caching": True},
    "prefix-block-above-step": {"prefix_caching": True, "max_batched_tokens": 2048},
    "fp8-cache": {"kv_cache": "fp8"},
    "flashinfer-decode": {"attention_backend": "FLASHINFER", "has_attention_backend": True},
    "memory-fraction-high": {"memory_fraction": 0.9},
    "many-drafts": {"speculation_tokens": 5},
}


def test_every_rail_has_a_case_here():
    assert set(TRIPS) == {rail.rule for rail in load_guard_rails()}


def test_every_fact_a_rail_names_exists():
    for rail in load_guard_rails():
        assert set(rail.applies) <= set(CALM), rail.rule


@pytest.mark.parametrize("rule", TRIPS)
def test_each_rail_alone_catches_its_own_combination_and_spares_a_calm_one(rule):
    [rail] = [rail for rail in load_guard_rails() if rail.rule == rule]
    assert apply_rails([rail], CALM) == ()
    facts = {**CALM, **TRIPS[rule]}
    if rail.effect == "warn":
        [warning] = apply_rails([rail], facts)
        assert warning.startswith(rule)
    else:
        with pytest.raises(Exception, match=f"guard rail {rule}"):
            apply_rails([rail], facts)


def test_all_refusals_are_reported_together(tmp_path):
    found = problems(
        tmp_path,
        profile="v2-tq",
        **{"engine.max_sequences": 4, "engine.options": {"attention-backend": "FLASH_ATTN"}},
    )
    assert len(found) == 2


@pytest.mark.parametrize("profile", ["v2", "v2-tq", "base"])
@pytest.mark.parametrize("model", ["qwen3.5-122b", "qwen3.5-35b", "lab-tiny", "lab-stub"])
def test_shipped_pairs_pass_without_a_refusal(model, profile, tmp_path):
    assert problems(tmp_path, model=model, profile=profile) == []


def test_facts_name_the_backend_however_the_option_is_spelt(tmp_path):
    for spelling in ("attention-backend", "attention_backend"):
        found = problems(tmp_path, **{"engine.options": {spelling: "FLASHINFER"}})
        assert len(found) == 1
