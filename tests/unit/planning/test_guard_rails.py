import dataclasses
import re
from pathlib import Path

import pytest

from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.engine_options import OWNED_OPTIONS
from spark_deploy.plan.engine_arguments import engine_options
from spark_deploy.plan.guard_rails import apply_rails, facts_of
from spark_deploy.plan.memory import plan_memory
from tests.unit.planning.plans import CATALOG, LARGE, plan_of, settings_of, shipped_catalog, whats

RAILS = shipped_catalog().rails

CALM = {
    "model": "m",
    "profile": "p",
    "kv_cache": "auto",
    "speculation_method": None,
    "speculation_tokens": 0,
    "own_draft_model": False,
    "drafts_by_option": False,
    "prefix_caching": False,
    "max_sequences": 4,
    "max_batched_tokens": 8192,
    "memory_fraction": 0.8,
    "devices": 1,
    "executor": "",
    "block_tokens": 2096,
    "attention_backend": "",
    "has_attention_backend": False,
    "async_scheduling": True,
    "atomic_add": False,
    "unread_variables": False,
    "stretched_context": False,
    "xqa_decode": True,
    "eager": False,
    "piecewise_graphs": False,
    "pipeline_stages": 1,
    "expert_width_per_device": 1024,
    "hosts": 1,
    "deep_gemm": False,
    "formats": "org/model-int4",
    "online_quantisation": False,
    "engine_counts_cache_as_used": False,
    "engine_prefixes_unproven": False,
    "expose": "loopback",
    "tls": "off",
    "plugin": True,
    "engine_mode": "native",
    "shared_experts": "fp8-donor",
    "head": "int8-g128",
    "vision": False,
    "load_format": "fastsafetensors",
    "tree_needs_plugin": True,
    "tree_repeats_names": False,
    "plugins_by_environment": False,
    "old_runner": False,
    "trust_remote_code": False,
    "code_by_option": False,
    "unpickles": False,
    "docker_listens": False,
    "questions_logged": False,
    "compaction_proactiveness": None,
}
TQ = {"kv_cache": "turboquant_k8v4", "max_sequences": 1}
STOCK = {"plugin": False, "tree_needs_plugin": False}
TRIPS = {
    "turboquant-with-drafts": {**TQ, **STOCK, "speculation_tokens": 2},
    "turboquant-with-several-sequences": {**TQ, **STOCK, "max_sequences": 2},
    "turboquant-with-prefix-caching": {**TQ, **STOCK, "prefix_caching": True},
    "turboquant-with-attention-backend": {**TQ, "has_attention_backend": True},
    "turboquant-on-the-old-runner": {**TQ, "old_runner": True},
    "turboquant-three-bit-keys": {"kv_cache": "turboquant_3bit_nc", "max_sequences": 1},
    "drafts-with-prefix-caching": {"speculation_tokens": 2, "prefix_caching": True},
    "drafts-with-prefix-caching-in-older-engines": {
        "speculation_tokens": 2,
        "prefix_caching": True,
        "engine_prefixes_unproven": True,
    },
    "prefix-block-above-step": {"prefix_caching": True, "max_batched_tokens": 2048},
    "fp8-cache": {"kv_cache": "fp8", "piecewise_graphs": True},
    "fp8-cache-without-drafts": {"kv_cache": "fp8", "piecewise_graphs": True},
    "fp8-cache-with-full-graphs": {"kv_cache": "fp8"},
    "flashinfer-without-drafts": {"attention_backend": "FLASHINFER"},
    "flashinfer-with-drafts": {
        "attention_backend": "FLASHINFER",
        "speculation_tokens": 2,
        "piecewise_graphs": True,
    },
    "flashinfer-decode": {"attention_backend": "FLASHINFER", "has_attention_backend": True},
    "memory-fraction-high": {"memory_fraction": 0.83},
    "memory-fraction-unsafe": {"memory_fraction": 0.91},
    "many-drafts": {"speculation_method": "mtp", "speculation_tokens": 5},
    "dflash": {
        "speculation_method": "dflash",
        "speculation_tokens": 8,
        "drafts_by_option": True,
    },
    "draft-of-another-model": {"own_draft_model": True, "drafts_by_option": True},
    "drafter-of-a-repository": {"own_draft_model": True},
    "drafts-by-option": {"drafts_by_option": True},
    "one-gpu-in-a-host": {"devices": 2},
    "ray": {"executor": "ray"},
    "pipeline-parallel-with-drafts": {"pipeline_stages": 2, "speculation_tokens": 2},
    "experts-of-one-group": {"expert_width_per_device": 128},
    "prefixes-on-a-pair-of-397b": {
        "model": "qwen3.5-397b",
        "hosts": 2,
        "prefix_caching": True,
    },
    "nvfp4": {"formats": "org/model-nvfp4"},
    "deep-gemm": {"deep_gemm": True},
    "marlin-atomic-add": {"atomic_add": True},
    "variables-nobody-reads": {"unread_variables": True},
    "stretched-context": {"stretched_context": True},
    "repeated-names-with-fastsafetensors": {"tree_repeats_names": True},
    "plugin-tree-on-the-plain-engine": {"plugin": False},
    "plugins-by-environment": {"plugins_by_environment": True},
    "own-head-without-the-plugin": {**STOCK, "head": "int8-triton", "tree_needs_plugin": True},
    "own-head-with-a-plain-tree": {"head": "int8-triton", "tree_needs_plugin": False},
    "portable-mode-with-a-plain-tree": {"engine_mode": "portable", "tree_needs_plugin": False},
    "online-fp8-with-the-plugin": {"online_quantisation": True},
    "open-network-without-tls": {"expose": "lan"},
    "trust-remote-code": {"trust_remote_code": True},
    "code-by-option": {"code_by_option": True},
    "insecure-serialisation": {"unpickles": True},
    "pickled-weights": {"load_format": "pt"},
    "docker-on-the-network": {"docker_listens": True},
    "questions-in-the-journal": {"questions_logged": True},
    "no-background-compaction": {"compaction_proactiveness": 0},
    "engine-that-needs-dropped-caches": {**STOCK, "engine_counts_cache_as_used": True},
}


def test_every_rail_has_a_case_here():
    assert set(TRIPS) == {rail.rule for rail in RAILS}


def test_every_fact_a_rail_names_exists():
    for rail in RAILS:
        assert set(rail.applies) <= set(CALM), rail.rule


@pytest.mark.parametrize("rule", TRIPS)
def test_each_rail_alone_catches_its_own_combination_and_spares_a_calm_one(rule):
    [rail] = [rail for rail in RAILS if rail.rule == rule]
    assert apply_rails([rail], CALM) == ()
    facts = {**CALM, **TRIPS[rule]}
    if rail.effect == "warn":
        [warning] = apply_rails([rail], facts)
        assert warning.startswith(rule)
    else:
        with pytest.raises(Exception, match=f"guard rail {rule}"):
            apply_rails([rail], facts)


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_a_drafter_of_a_repository_beside_a_hybrid_is_warned_of_and_not_refused(method):
    facts = {"speculation_method": method, "speculation_tokens": 3, "own_draft_model": True}
    warned = apply_rails(RAILS, {**CALM, **facts})
    assert [one.partition(":")[0] for one in warned] == ["drafter-of-a-repository"]


RESULTS = Path(__file__).parents[3] / "proofs/results/gpu"


def test_what_is_called_measured_names_a_result_file_that_is_there():
    measured = [rail for rail in RAILS if rail.evidence == "measured"]
    for rail in measured:
        named = re.findall(r"[\w./-]+\.json", rail.source)
        assert named, rail.rule
        assert all([*RESULTS.parent.rglob(Path(name).name)] for name in named), rail.rule
    assert {rail.rule for rail in measured} >= {"flashinfer-without-drafts", "experts-of-one-group"}


def test_what_is_called_read_names_what_was_read_and_ours_is_there():
    ours = ("files/", "spark_deploy/", "docs/", "catalog/")
    for rail in (rail for rail in RAILS if rail.evidence == "read"):
        named = re.findall(
            r"[\w./-]+/[\w./-]*|\w+\.py|metadata|source|socket|hardware", rail.source
        )
        assert named, rail.rule
        mine = [one for one in named if one.startswith(ours)]
        assert all((RESULTS.parents[2] / one).exists() for one in mine), rail.rule


def test_what_is_only_reported_names_who_reported_it():
    for rail in (rail for rail in RAILS if rail.evidence == "reported"):
        assert re.search(r"#\d+|community|warnings of", rail.source), rail.rule


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"VLLM_ATTENTION_BACKEND": "FLASHINFER"}, True),
        ({"VLLM_USE_V1": "1", "OMP_NUM_THREADS": "4"}, True),
        ({"VLLM_USE_FLASHINFER_SAMPLER": "0"}, False),
    ],
)
def test_a_variable_that_the_engine_does_not_read_any_more_is_warned_of(variables, told):
    warned = [one for one in plan_of(**{"engine.environment": variables}).warnings
              if one.startswith("variables-nobody-reads")]  # fmt: skip
    assert bool(warned) is told


@pytest.mark.parametrize(
    ("image", "unproven"),
    [
        ("vllm/vllm-openai:v0.33.0", False),
        ("vllm/vllm-openai:v0.34.1", False),
        ("vllm/vllm-openai:v0.32.0", True),
        ("registry.lan/engine:ours", False),  # says nothing of its version
    ],
)
def test_engines_older_than_the_measured_one_keep_drafts_and_prefixes_apart(image, unproven):
    settings = settings_of(**{"images.engine": image})
    profile = CATALOG.profile("agent", "large")
    facts = facts_of(LARGE, profile, plan_memory(LARGE, profile, settings), settings)
    assert facts["engine_prefixes_unproven"] is unproven


@pytest.mark.parametrize(
    ("serve", "told"),
    [
        ({"serve.expose": "lan"}, True),
        ({"serve.expose": "lan", "serve.tls": "private-ca"}, False),
        ({"serve.expose": "tailscale"}, False),  # encrypts by itself
        ({"serve.expose": "docker"}, False),
    ],
)
def test_a_key_in_clear_text_on_the_network_is_warned_of(serve, told):
    found = settings_of(**serve)
    model, profile = LARGE, CATALOG.profile("v2", "large")
    facts = facts_of(model, profile, plan_memory(model, profile, found), found)
    warned = any("clear text" in text for text in apply_rails(RAILS, facts))
    assert warned == told


def test_all_refusals_are_reported_together():
    found = whats(
        profile="v2-tq",
        **{"engine.options": {"attention-backend": "FLASH_ATTN", "pipeline_parallel_size": 2}},
    )
    assert len(found) == 3  # the third: no host has a GPU for a second stage


def test_the_facts_of_a_profile_are_those_that_rails_speak_about():
    model, profile = LARGE, CATALOG.profile("v2", "large")
    settings = settings_of()
    facts = facts_of(model, profile, plan_memory(model, profile, settings), settings)
    assert set(facts) == set(CALM)
    assert {**CALM, **facts} == facts
    differs = {name for name in CALM if facts[name] != CALM[name]}
    names = {"model", "profile", "formats", "speculation_method", "speculation_tokens"}
    assert differs <= {*names, "block_tokens"}


@pytest.mark.parametrize(
    ("model", "options", "refused"),
    [
        ("small", {"tensor-parallel-size": 2}, False),
        ("small", {"tensor_parallel_size": 4}, True),
        ("small", {"tensor-parallel-size": 4, "enable-expert-parallel": True}, False),
        ("large", {"tensor-parallel-size": 4}, False),
        ("large", {"tensor-parallel-size": 8}, True),
    ],
)
@pytest.mark.parametrize("profile", ["v2", "v2-native", "base"])
def test_experts_cut_down_to_one_group_of_scales_are_refused(model, options, refused, profile):
    found = whats(model=model, profile=profile, **{"engine.options": options})
    assert any("experts-of-one-group" in problem for problem in found) == refused
    assert any("one-gpu-in-a-host" in problem for problem in found)


def test_turboquant_with_drafts_and_four_sequences_needs_our_backend():
    profile = CATALOG.profile("v2-tq", "large")
    assert (profile.plugin, profile.limits.max_sequences) == (True, 4)
    assert profile.speculation is not None
    model = LARGE
    settings = settings_of()
    stock = dataclasses.replace(
        profile, plugin=False, shared_experts="int8-g128", layout="full", load_format="auto"
    )
    memory = plan_memory(model, stock, settings)
    with pytest.raises(PlanError) as refused:
        apply_rails(RAILS, facts_of(model, stock, memory, settings))
    assert [problem.what.split(":")[0] for problem in refused.value.problems] == [
        "refused by guard rail turboquant-with-drafts",
        "refused by guard rail turboquant-with-several-sequences",
    ]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"speculative-config": {"method": "dflash", "model": "org/draft"}}, "dflash"),
        ({"speculative_config": '{"method": "mtp", "model": "x/y"}'}, "draft-of-another-model"),
        ({"pipeline-parallel-size": 2}, "pipeline-parallel-with-drafts"),
        ({"quantization-config": {"targets": {"re:x": "nvfp4"}}}, "nvfp4"),
        (
            {"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}},
            "drafts-by-option",
        ),
        ({"attention-config": {"backend": "flashinfer"}}, "flashinfer-decode"),
        ({"quantization-config": {"targets": {"re:x": "fp8_per_block"}}}, "online-fp8-with"),
    ],
)
def test_rails_see_what_an_option_does(options, rule):
    found = whats(**{"engine.options": options})
    assert any(f"guard rail {rule}" in problem for problem in found)


@pytest.mark.parametrize(
    ("image", "refused"),
    [
        ("vllm/vllm-openai:v0.24.0", True),
        ("vllm/vllm-openai:v0.9.2-aarch64", True),
        (f"registry:5000/vllm:0.24.1@sha256:{'a' * 64}", True),
        ("vllm/vllm-openai:v0.25.0", False),
        ("vllm/vllm-openai:v0.33.0", False),
        ("nvcr.io/nvidia/vllm:25.09-py3", False),
        ("registry:5000/v0.9/vllm:nightly", False),
        (f"vllm/vllm-openai@sha256:{'0' * 64}", False),
    ],
)
def test_an_engine_that_takes_cache_for_used_memory_is_refused_without_the_plugin(image, refused):
    for profile in ("v2-native", "online-fp8", "base"):
        found = whats(profile=profile, **{"images.engine": image})
        assert [("engine-that-needs-dropped-caches" in one) for one in found] == [True] * refused
    # With our plugin the engine is refused as one it does not know: test_limits.py.
    assert not any("engine-that" in one for one in whats(profile="v2", **{"images.engine": image}))


def test_rails_see_the_environment():
    [found] = whats(**{"engine.environment": {"VLLM_USE_DEEP_GEMM": "1"}})
    assert "guard rail deep-gemm" in found
    variable = {"engine.environment": {"VLLM_MARLIN_USE_ATOMIC_ADD": "1"}}
    assert any("marlin-atomic-add" in text for text in plan_of(**variable).warnings)


def test_every_option_of_the_plan_has_an_owner_or_is_free_to_change():
    model, profile = LARGE, CATALOG.profile("v2", "large")
    settings = settings_of()
    made = engine_options(model, profile, plan_memory(model, profile, settings))
    free = {"load-format", "reasoning-parser", "enable-auto-tool-choice", "tool-call-parser"}
    free |= {"disable-access-log-for-endpoints"}
    judged_by_rails = {"speculative-config", "kernel-config"}
    assert set(made) - set(OWNED_OPTIONS) == free | judged_by_rails


def test_facts_name_the_backend_however_the_option_is_spelt():
    for spelling in ("attention-backend", "attention_backend"):
        found = whats(**{"engine.options": {spelling: "FLASHINFER"}})
        assert len(found) == 1
