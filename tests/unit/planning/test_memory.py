import functools
import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from spark_deploy.config.catalog.architecture import LinearAttention
from spark_deploy.config.catalog.model import HybridModel
from spark_deploy.config.catalog.profile import Speculation
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.documents import GIB
from spark_deploy.config.settings.engine import KvCache
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.plan.kv_cache import hybrid_shape
from spark_deploy.plan.memory import plan_memory, weight_sizes
from spark_deploy.plan.resolve import model_and_profile, plan_problems
from tests.unit.planning.plans import (
    CATALOG,
    LARGE,
    NOWHERE,
    problems,
    settings_of,
    shipped_catalog,
)

SHIPPED = shipped_catalog()


def profile_with(name, **changes):
    return replace(CATALOG.profile(name, "large"), **changes)


def memory_of(profile="v2", **settings):
    chosen = settings_of(profile=profile, **settings)
    return plan_memory(*model_and_profile(chosen, CATALOG), chosen)


@pytest.mark.parametrize(
    ("name", "tree_gb", "mtp_gb"),
    [("qwen3.5-122b", 72.37, 5.05), ("qwen3.5-35b", 21.09, 0.46), ("qwen3.5-397b", 224.3, 13.2)],
)
def test_computed_weight_sizes_match_published_checkpoints(name, tree_gb, mtp_gb):
    sizes = weight_sizes(SHIPPED.model(name).architecture)
    assert sizes.tree_bytes / 1e9 == pytest.approx(tree_gb, rel=0.001)
    assert sizes.mtp_bytes / 1e9 == pytest.approx(mtp_gb, rel=0.01)


@pytest.mark.parametrize(
    ("dtype", "block_tokens"),
    # Block sizes that vLLM chooses for this architecture without drafts.
    [
        ("auto", 2096),
        ("fp8", 4176),
        ("turboquant_k8v4", 5504),
        ("turboquant_4bit_nc", 8160),
        ("turboquant_k3v4_nc", 9280),
        ("turboquant_3bit_nc", 10784),
    ],
)
def test_cache_blocks_match_published_sizes(dtype, block_tokens):
    profile = profile_with("base", kv_cache=KvCache(dtype=dtype))
    assert hybrid_shape(LARGE.architecture, profile).block_tokens == block_tokens


@pytest.mark.parametrize(
    ("options", "recurrence_bytes", "convolution_bytes"),
    [
        ({}, 4, 2),
        ({"mamba-ssm-cache-dtype": "float16"}, 2, 2),
        ({"mamba_ssm_cache_dtype": "bfloat16", "mamba-cache-dtype": "float32"}, 2, 4),
        ({"mamba-cache-dtype": "float32"}, 4, 4),
        # The models state float32 for the recurrence, which the engine prefers to this option.
        ({"mamba-cache-dtype": "float16"}, 4, 2),
    ],
)
def test_cache_blocks_follow_the_number_formats_of_states(
    options, recurrence_bytes, convolution_bytes
):
    profile = profile_with("base", options=options)
    net = LARGE.architecture.linear_attention
    rows = (2 * net.key_heads + net.value_heads) * net.head_width * (net.kernel - 1)
    size = net.value_heads * net.head_width**2 * recurrence_bytes + rows * convolution_bytes
    assert hybrid_shape(LARGE.architecture, profile).block_tokens == -(-size // (2048 * 16)) * 16


RECALL = replace(
    LARGE.architecture, layers=4, full_attention_every=2, kv_heads=2, head_width=256,
    linear_attention=LinearAttention(key_heads=2, value_heads=8, head_width=128),
)  # fmt: skip


@pytest.mark.parametrize(
    "stage", ["recall", "turboquant", "wide", "drafts", "prefixes", "flashinfer"]
)
def test_cache_block_sizes_match_running_engines(stage):
    path = CHECKOUT / f"proofs/results/gpu/recall-{stage}.json"
    runs = {name: run for name, run in json.loads(path.read_text())["runs"].items()
            if run["block_tokens"]}  # fmt: skip
    planned = {}
    for name, run in runs.items():
        options = run["options"]
        drafts = options.get("speculative_config", {}).get("num_speculative_tokens")
        prefill = run.get("additional", {}).get("gdn_prefill_backend", "triton")
        profile = profile_with(
            "base",
            kv_cache=KvCache(dtype=options.get("kv_cache_dtype", "auto")),
            speculation=Speculation(method="mtp", tokens=drafts) if drafts else None,
            prefix_caching=bool(options.get("enable_prefix_caching")),
            options={
                "gdn-prefill-backend": prefill,
                "mamba-ssm-cache-dtype": options.get("mamba_ssm_cache_dtype", "auto"),
            },
        )
        planned[name] = hybrid_shape(RECALL, profile).block_tokens
    assert planned == {name: run["block_tokens"] for name, run in runs.items()}
    assert len(runs) > 5


def test_cache_of_model_without_linear_layers_has_no_states():
    dense = replace(LARGE.architecture, full_attention_every=1, linear_attention=None)
    shape = hybrid_shape(dense, profile_with("v2"))
    assert (shape.block_tokens, shape.attention_groups, shape.state_blocks) == (16, 1, 0)
    assert shape.request_blocks(1600) == 100
    assert list(dense.violations()) == []
    assert list(replace(dense, full_attention_every=4).violations())


@pytest.mark.parametrize("profile", ["v2", "v2-tq", "base"])
def test_planned_memory_parts_add_up_to_the_memory_fraction(profile):
    plan = memory_of(profile)
    used = plan.weights_bytes + plan.drafter_bytes + plan.graphs_bytes + plan.kv_cache_bytes
    assert used == pytest.approx(0.8 * plan.total_bytes, abs=1)
    assert used + plan.reserve_bytes <= plan.total_bytes < 120 * GIB


def test_memory_reserve_and_allowed_containers_lower_the_memory_fraction():
    plan = memory_of(**{"memory.reserve_gib": 30})
    assert plan.memory_fraction == 0.74
    assert plan.needed_bytes < 0.77 * plan.total_bytes
    assert memory_of(allow_containers={"comfyui": 12.5, "tts": 5.5}) == plan
    assert memory_of(**{"memory.reserve_gib": 1.5}).floor_bytes == 0.75 * GIB


def test_vision_tower_reduces_cache():
    off, on = memory_of(), memory_of(**{"engine.vision": True})
    assert on.weights_bytes - off.weights_bytes == on.vision_bytes == 900_000_000
    assert off.kv_cache_bytes - on.kv_cache_bytes == 900_000_000


def test_fixed_cache_size_determines_memory_fraction():
    plan = memory_of(**{"engine.kv_cache_gib": 10})
    assert (plan.kv_cache_bytes, plan.memory_fraction) == (10 * GIB, 0.67)
    assert plan.memory_fraction * plan.total_bytes >= plan.weights_bytes + plan.kv_cache_bytes


@pytest.mark.parametrize(
    ("dtype", "published_tokens"),
    # Published for a Spark at 0.90 with vLLM 0.19: blocks / four cache groups.
    [("auto", 355_000), ("turboquant_4bit_nc", 1_400_000)],
)
def test_cache_size_of_122b_is_near_published_size(dtype, published_tokens):
    profile = profile_with("v2", kv_cache=KvCache(dtype=dtype))
    limits = replace(profile.limits, memory_fraction=0.9, max_sequences=1)
    plan = plan_memory(LARGE, replace(profile, limits=limits), settings_of())
    assert plan.kv_tokens / 4 == pytest.approx(published_tokens, rel=0.05)


def test_reports_sizes_and_alternatives_when_nothing_fits():
    [problem] = problems(model="huge")
    assert problem.where == "model huge with profile v2"
    assert "weights 194.2 GiB" in problem.what
    assert "no setting helps" in problem.fix
    assert "choose model large, or serve huge on 4 hosts together" in problem.fix


def settings_from(suggestion):
    change: dict[str, Any] = {}
    for part in suggestion.split(" and "):
        setting = re.fullmatch(r"(?:lower|raise|set) (\S+) to (\S+)", part)
        choice = re.fullmatch(r"choose (profile|model) (\S+)", part)
        if setting:
            change[setting[1]] = yaml.safe_load(setting[2])
        elif choice:
            change[choice[1]] = choice[2]
        else:
            assert part == "drop engine.kv_cache_gib"
            change["engine.kv_cache_gib"] = None
    return change


@pytest.mark.parametrize(
    ("settings", "suggestions"),
    [
        (
            {"memory.reserve_gib": 44},
            [
                "lower memory.reserve_gib to 41",
                "set engine.max_context_tokens to 131072",
                "set engine.drafts to 0",
            ],
        ),
        (
            {"memory.reserve_gib": 50},
            [
                "lower memory.reserve_gib to 41",
                "set engine.max_context_tokens to 131072 and set engine.drafts to 0",
                "set engine.max_context_tokens to 131072 and choose profile agent",
            ],
        ),
        (
            {"engine.kv_cache_gib": 1},
            ["drop engine.kv_cache_gib", "set engine.max_context_tokens to 16384"],
        ),
        (
            {"engine.memory_fraction": 0.55},
            [
                "raise engine.memory_fraction to 0.8",
                "set engine.max_context_tokens to 16384 and set engine.drafts to 0",
                "set engine.max_context_tokens to 8192 and choose profile agent",
            ],
        ),
        ({"memory.reserve_gib": 110}, ["lower memory.reserve_gib to 41"]),
    ],
)
def test_suggests_the_cheapest_changes_that_each_make_the_model_fit(settings, suggestions):
    [problem] = problems(**settings)
    assert problem.fix.split("; or ") == suggestions
    for suggestion in suggestions:
        assert problems(**{**settings, **settings_from(suggestion)}) == []


def shipped_settings(count, **overrides):
    hosts = [f"host-{number}" for number in range(count)]
    if count > 1:
        overrides["cluster.hosts"] = hosts
    return load_hosts({"spark": hosts}, root=NOWHERE, overrides=overrides)["host-0"].settings


def suggestions_for(count, **overrides):
    refusals = plan_problems(shipped_settings(count, **overrides), SHIPPED)
    return next((p.fix for p in refusals if "does not fit on" in p.what), None)


MODELS = [name for name, model in SHIPPED.models.items() if isinstance(model, HybridModel)]
PAIRS = [pair for pair in itertools.product(MODELS, SHIPPED.profile_names) if pair[1] != "plain"]


@functools.cache
def fits_with_all_changes(count, model, total_gib):
    change = {
        "memory.total_gib": total_gib, "memory.reserve_gib": 8, "engine.vision": False,
        "engine.drafts": 0, "engine.max_context_tokens": 8192,
    }  # fmt: skip
    for profile, fraction in itertools.product(SHIPPED.profile_names, (0.8, 0.85, 0.9)):
        change["engine.memory_fraction"] = fraction
        settings = shipped_settings(count, model=model, profile=profile, **change)
        if plan_problems(settings, SHIPPED) == []:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("model", "profile"), PAIRS)
def test_printed_suggestions_are_accepted(model, profile, count):
    pair: dict[str, Any] = {"model": model, "profile": profile}
    # Half of the memory, too: with all of it only the largest model is refused.
    for pair["memory.total_gib"] in (119.7, 48):
        fix = suggestions_for(count, **pair)
        if fix is None:
            continue
        if "no setting helps" in fix:
            assert not fits_with_all_changes(count, model, pair["memory.total_gib"])
        fix, _, hosts = fix.partition(f", or serve {model} on ")
        fix = fix.rpartition("GiB: ")[2]
        for suggestion in fix.split("; or ") if fix != "choose a smaller model" else []:
            settings = shipped_settings(count, **{**pair, **settings_from(suggestion)})
            assert plan_problems(settings, SHIPPED) == [], suggestion
        if hosts:
            assert suggestions_for(int(hosts.split()[0]), **pair) is None


def test_suggests_smallest_memory_fraction_for_two_hosts():
    pair = {"model": "qwen3.5-397b", "profile": "v2"}
    fix = suggestions_for(2, **pair)
    change = settings_from(fix.split("; or ")[0])
    assert 0.8 < change["engine.memory_fraction"] <= 0.9
    change["engine.memory_fraction"] = round(change["engine.memory_fraction"] - 0.01, 2)
    assert suggestions_for(2, **{**pair, **change})
