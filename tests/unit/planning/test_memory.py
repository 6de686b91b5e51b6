import dataclasses
import functools
import itertools
import json
import re
from pathlib import Path

import pytest
import yaml
from spark_contract.tool import COMPILING

from spark_deploy.cli.plan_text import plan_lines, summary_lines
from spark_deploy.config.catalog.model import HybridModel, LinearAttention
from spark_deploy.config.catalog.profile import Speculation
from spark_deploy.config.settings.engine_options import KvCache
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.plan.kv_cache import cache_shape
from spark_deploy.plan.memory import GIB, plan_memory, weights_of
from spark_deploy.plan.resolve import effective_profile, pair_of, problems_of
from tests.unit.planning.plans import (
    CATALOG,
    FIXTURE,
    LARGE,
    NOWHERE,
    plan_of,
    problems,
    settings_of,
    shipped_catalog,
)


def profile_with(name, **changes):
    return dataclasses.replace(CATALOG.profile(name, "large"), **changes)


@pytest.mark.parametrize(
    ("name", "tree_gb", "mtp_gb"),
    [("qwen3.5-122b", 72.37, 5.05), ("qwen3.5-35b", 21.09, 0.46), ("qwen3.5-397b", 224.3, 13.2)],
)
def test_weights_from_the_architecture_match_the_published_trees(name, tree_gb, mtp_gb):
    sizes = weights_of(shipped_catalog().model(name).architecture)
    assert sizes.tree_bytes / 1e9 == pytest.approx(tree_gb, rel=0.001)
    assert sizes.mtp_bytes / 1e9 == pytest.approx(mtp_gb, rel=0.01)


@pytest.mark.parametrize(
    ("dtype", "block_tokens"),
    # Block sizes the engine chooses for this architecture without drafts.
    [
        ("auto", 2096),
        ("fp8", 4176),
        ("turboquant_k8v4", 5504),
        ("turboquant_4bit_nc", 8160),
        ("turboquant_k3v4_nc", 9280),
        ("turboquant_3bit_nc", 10784),
    ],
)
def test_cache_blocks_are_those_of_the_engine(dtype, block_tokens):
    profile = profile_with("base")
    profile = dataclasses.replace(
        profile, kv_cache=dataclasses.replace(profile.kv_cache, dtype=dtype)
    )
    shape = cache_shape(LARGE.architecture, profile)
    assert shape.block_tokens == block_tokens


RECALL = dataclasses.replace(
    LARGE.architecture,
    layers=4,
    full_attention_every=2,
    kv_heads=2,
    head_width=256,
    linear_attention=LinearAttention(key_heads=2, value_heads=8, head_width=128),
)
RESULTS = Path(__file__).parents[3] / "proofs/results/gpu"


def measured_blocks(stage):
    """Yield name, options, kernel of the prefill and block of every engine of a result file."""
    for name, run in json.loads((RESULTS / f"recall-{stage}.json").read_text())["runs"].items():
        prefill = run.get("additional", {}).get("gdn_prefill_backend", "triton")
        if run["block_tokens"]:
            yield name, run["options"], prefill, run["block_tokens"]


@pytest.mark.parametrize(
    "stage", ["recall", "turboquant", "wide", "drafts", "prefixes", "flashinfer"]
)
def test_cache_blocks_are_those_that_running_engines_made(stage):
    planned, measured = {}, {}
    for name, options, prefill, block_tokens in measured_blocks(stage):
        drafts = options.get("speculative_config", {}).get("num_speculative_tokens")
        profile = profile_with(
            "base",
            kv_cache=KvCache(dtype=options.get("kv_cache_dtype", "auto")),
            speculation=Speculation(method="mtp", tokens=drafts) if drafts else None,
            prefix_caching=bool(options.get("enable_prefix_caching")),
            options={"gdn-prefill-backend": prefill},
        )
        planned[name], measured[name] = cache_shape(RECALL, profile).block_tokens, block_tokens
    assert planned == measured
    assert len(measured) > 5


@pytest.mark.parametrize(
    ("model", "by_flashinfer", "by_triton"), [("large", 2112, 2096), ("small", 1088, 1056)]
)
def test_kept_prefixes_make_blocks_multiples_of_64_unless_triton_is_chosen(
    model, by_flashinfer, by_triton
):
    architecture = CATALOG.model(model).architecture
    agent = CATALOG.profile("agent", model)
    chosen = dataclasses.replace(agent, options={"gdn_prefill_backend": "triton"})
    assert cache_shape(architecture, agent).block_tokens == by_flashinfer
    assert cache_shape(architecture, chosen).block_tokens == by_triton


def test_drafts_add_a_layer_to_the_cache_and_states_to_each_request():
    model = LARGE.architecture
    shapes = [cache_shape(model, profile_with(name)) for name in ("base", "v2")]
    assert [one.attention_groups for one in shapes] == [1, 1]
    assert [one.block_bytes / one.block_tokens for one in shapes] == [24 * 1024, 26 * 1024]
    assert [one.state_blocks for one in shapes] == [3, 9]


def test_a_model_without_gated_delta_nets_keeps_no_states_and_pages_of_the_usual_size():
    every = dataclasses.replace(LARGE.architecture, full_attention_every=1, linear_attention=None)
    shape = cache_shape(every, profile_with("v2"))
    assert (shape.block_tokens, shape.attention_groups, shape.state_blocks) == (16, 1, 0)
    assert shape.request_blocks(1600) == 100
    assert list(every.broken()) == []
    assert list(dataclasses.replace(every, full_attention_every=4).broken())


def test_prefix_caching_keeps_a_second_state_of_each_request():
    model = LARGE.architecture
    assert cache_shape(model, profile_with("agent")).state_blocks == 6


def test_the_parts_add_up_and_never_exceed_the_pool():
    settings = settings_of()
    for profile in ("v2", "v2-tq", "base"):
        plan = plan_memory(LARGE, profile_with(profile), settings)
        used = plan.weights_bytes + plan.drafter_bytes + plan.graphs_bytes + plan.kv_cache_bytes
        assert used == pytest.approx(0.8 * plan.total_bytes, abs=1)
        assert used + plan.reserve_bytes <= plan.total_bytes
        assert plan.total_bytes < 120 * GIB, "never plan with the number on the box"


def test_a_larger_reserve_lowers_the_fraction_the_engine_gets():
    model, profile = LARGE, profile_with("v2")
    plan = plan_memory(model, profile, settings_of(**{"memory.reserve_gib": 30}))
    assert plan.memory_fraction == 0.74
    assert plan.needed_bytes < 0.77 * plan.total_bytes


def test_what_other_containers_may_take_is_taken_off_the_engine_s_share():
    model, profile = LARGE, profile_with("v2")
    allowed = settings_of(allow_containers={"comfyui": 12.5, "tts": 5.5})
    reserved = settings_of(**{"memory.reserve_gib": 30})  # 12 of them by default
    assert plan_memory(model, profile, allowed) == plan_memory(model, profile, reserved)


def test_a_pinned_cache_decides_the_fraction():
    settings = settings_of(**{"engine.kv_cache_gib": 10})
    profile = effective_profile(profile_with("v2"), settings)
    plan = plan_memory(LARGE, profile, settings)
    assert plan.kv_cache_bytes == 10 * GIB
    assert plan.memory_fraction == 0.67
    assert plan.memory_fraction * plan.total_bytes >= plan.weights_bytes + plan.kv_cache_bytes


def test_turboquant_holds_more_tokens_than_sixteen_bit():
    settings = settings_of()
    model = LARGE
    tokens = {p: plan_memory(model, profile_with(p), settings).kv_tokens for p in ("v2", "v2-tq")}
    assert tokens["v2-tq"] > 2.5 * tokens["v2"] > 2_400_000


def test_vision_is_paid_for_and_shown():
    model, profile = LARGE, profile_with("v2")
    off = plan_memory(model, profile, settings_of())
    settings = settings_of(**{"engine.vision": True})
    on = plan_memory(model, effective_profile(profile, settings), settings)
    assert (off.vision_bytes, on.vision_bytes) == (0, 900_000_000)
    assert on.weights_bytes - off.weights_bytes == 900_000_000
    assert off.kv_cache_bytes - on.kv_cache_bytes == 900_000_000


def test_turboquant_pays_for_the_buffers_it_unpacks_prompts_into():
    settings = settings_of()
    model = LARGE
    plans = {p: plan_memory(model, profile_with(p), settings) for p in ("v2", "v2-tq")}
    assert plans["v2-tq"].graphs_bytes - plans["v2"].graphs_bytes == GIB // 2


def test_a_host_can_have_its_own_sequences_context_and_memory(tmp_path):
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars" / "b.yml").write_text(
        "engine: {max_sequences: 2, max_context_tokens: 65536}\nmemory: {reserve_gib: 30}\n"
    )
    hosts = load_hosts(
        {"spark": ["a", "b"]}, root=tmp_path, overrides={"model": "large"}, checkout=FIXTURE
    )
    model, found = LARGE, {}
    for name, host in hosts.items():
        profile = effective_profile(profile_with("v2"), host.settings)
        found[name] = (profile.limits, plan_memory(model, profile, host.settings))
    (_, usual), (limits, own) = found["a"], found["b"]
    assert (limits.max_sequences, limits.max_context_tokens) == (2, 65536)
    assert own.kv_cache_bytes < usual.kv_cache_bytes
    assert own.full_context_users > usual.full_context_users, "requests are shorter there"


def test_what_never_fits_names_both_sides_and_the_way_out():
    [problem] = problems(model="huge")
    assert problem.where == "model huge with profile v2"
    assert "weights 194.2 GiB" in problem.what
    assert "no setting makes it fit" in problem.fix
    assert "choose model large, or 4 hosts that serve it together" in problem.fix


def changed_by(way):
    """Read a way to fit as a user would: what to write into group_vars."""
    change = {}
    for part in way.split(" and "):
        setting = re.fullmatch(r"(?:lower|raise|set) (\S+) to (\S+)", part)
        chosen = re.fullmatch(r"choose (profile|model) (\S+)", part)
        if setting:
            change[setting[1]] = yaml.safe_load(setting[2])
        elif chosen:
            change[chosen[1]] = chosen[2]
        else:
            assert part == "drop engine.kv_cache_gib"
            change["engine.kv_cache_gib"] = None
    return change


@pytest.mark.parametrize(
    ("settings", "ways"),
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
def test_what_nearly_fits_names_the_cheapest_ways_and_each_of_them_works(settings, ways):
    [problem] = problems(**settings)
    assert problem.fix.split("; or ") == ways
    for way in ways:
        assert problems(**{**settings, **changed_by(way)}) == []


def shipped_settings(count, **overrides):
    """Return what the first of so many hosts of a cluster plans with; dotted keys."""
    hosts = [f"host-{number}" for number in range(count)]
    if count > 1:
        overrides["cluster.hosts"] = hosts
    return load_hosts({"spark": hosts}, root=NOWHERE, overrides=overrides)["host-0"].settings


def advice_for(count, **overrides):
    """Return the advice on a pair that does not fit; ``None`` for one that fits."""
    found = problems_of(shipped_settings(count, **overrides), shipped_catalog())
    return next((one.fix for one in found if "does not fit on" in one.what), None)


MODELS = [
    name for name, model in shipped_catalog().models.items() if isinstance(model, HybridModel)
]
PAIRS = [pair for pair in itertools.product(MODELS, shipped_catalog().profile_names)
         if pair[1] != "plain"]  # fmt: skip


@functools.cache
def fits_with_every_change(count, model, total_gib):
    """Tell whether any profile fits with all that the advice may change, as far as it may."""
    change = {
        "memory.total_gib": total_gib,
        "memory.reserve_gib": 8,
        "engine.vision": False,
        "engine.drafts": 0,
        "engine.max_context_tokens": 8192,
    }
    tried = itertools.product(shipped_catalog().profile_names, (0.8, 0.85, 0.9))
    return any(
        problems_of(
            shipped_settings(
                count, model=model, profile=profile, **change, **{"engine.memory_fraction": share}
            ),
            shipped_catalog(),
        )
        == []
        for profile, share in tried
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("model", "profile"), PAIRS)
def test_advice_applied_as_printed_is_accepted_by_the_plan(model, profile, count):
    pair = {"model": model, "profile": profile}
    # Half of the memory as well: only the largest model is refused with all of it.
    for pair["memory.total_gib"] in (119.7, 48):
        advice = advice_for(count, **pair)
        if advice is None:
            continue
        advice, _, hosts = advice.partition(", or ")
        advice = advice.rpartition("GiB: ")[2]
        for way in advice.split("; or ") if advice != "choose a smaller model" else []:
            settings = shipped_settings(count, **{**pair, **changed_by(way)})
            assert problems_of(settings, shipped_catalog()) == [], way
        if "no setting makes it fit" in (advice_for(count, **pair) or ""):
            assert not fits_with_every_change(count, model, pair["memory.total_gib"])
        if hosts:
            assert advice_for(int(hosts.split()[0]), **pair) is None


def test_two_hosts_that_hold_a_model_with_more_of_their_memory_are_shown_how():
    pair = {"model": "qwen3.5-397b", "profile": "v2"}
    way = advice_for(2, **pair).split("; or ")[0]
    change = changed_by(way)
    assert 0.8 < change["engine.memory_fraction"] <= 0.9
    lower = {"engine.memory_fraction": round(change["engine.memory_fraction"] - 0.01, 2)}
    assert advice_for(2, **{**pair, **change, **lower}), "asks for more than it takes"


def test_no_way_to_fit_asks_for_more_than_it_takes():
    # One GiB more reserved, or a context twice as long, would not fit.
    for settings in ({"memory.reserve_gib": 42}, {"engine.kv_cache_gib": 1,
                     "engine.max_context_tokens": 32768}):  # fmt: skip
        assert problems(**settings) != []


def test_a_cache_pinned_too_small_for_one_request_is_refused():
    [problem] = problems(**{"engine.kv_cache_gib": 1})
    assert problem.fix.startswith("drop engine.kv_cache_gib")


@pytest.mark.parametrize(
    ("dtype", "published_tokens", "apart"),
    # Published for one Spark at 0.90, as vLLM 0.19 counts: blocks / four cache groups.
    [("auto", 355_000, 0.05), ("turboquant_4bit_nc", 1_400_000, 0.05)],
)
def test_the_cache_of_the_122b_is_about_as_large_as_the_published_one(
    dtype, published_tokens, apart
):
    profile = profile_with("v2")
    profile = dataclasses.replace(
        profile,
        kv_cache=dataclasses.replace(profile.kv_cache, dtype=dtype),
        limits=dataclasses.replace(profile.limits, memory_fraction=0.9, max_sequences=1),
    )
    planned = plan_memory(LARGE, profile, settings_of())
    assert planned.kv_tokens / 4 == pytest.approx(published_tokens, rel=apart)


def test_the_plan_says_what_free_memory_is_for():
    plan, settings = plan_of(), settings_of()
    text = "\n".join(plan_lines(plan, *pair_of(settings, CATALOG)))
    free = re.search(r"\+ free ([\d.]+) GiB", text)
    parts = re.search(
        r"free: ([\d.]+) GiB .*\(memory.reserve_gib\), ([\d.]+) GiB .*; "
        r"below 4.0 GiB .*\(memory.floor_gib\)",
        text,
    )
    assert float(free[1]) == pytest.approx(float(parts[1]) + float(parts[2]), abs=0.11)
    assert float(free[1]) >= 0.2 * 119.7 - 0.1


def test_the_plan_counts_the_cache_as_the_engine_does():
    plan, (model, profile) = plan_of(), pair_of(settings_of(), CATALOG)
    memory, longest = plan.memory, plan.serve.check.max_model_len
    text = "\n".join(plan_lines(plan, model, profile))
    counted = re.search(r"engine reports ([\d,]+): room for ([\d.]+) requests of ([\d,]+)", text)
    tokens, requests, each = (float(word.replace(",", "")) for word in counted.groups())
    assert (each, tokens) == (longest, memory.counted_tokens(longest))
    assert tokens == pytest.approx(requests * each, rel=0.01)
    larger = "larger cache blocks"
    assert larger not in text
    portable = dataclasses.replace(profile, engine_mode="portable")
    assert larger in "\n".join(plan_lines(plan, model, portable))


@pytest.mark.parametrize("mode", ["native", "portable"])
def test_the_plan_counts_the_compilation_of_the_first_start_on_a_gpu(mode):
    plan = plan_of("large", "v2")
    check = dataclasses.replace(plan.serve.check, portable=mode == "portable")
    plan = dataclasses.replace(plan, serve=dataclasses.replace(plan.serve, check=check))
    _, profile = pair_of(settings_of(), CATALOG)
    assert (COMPILING in "\n".join(summary_lines(plan, profile))) is (mode == "native")


@pytest.mark.parametrize(("asked", "told"), [(0.8, False), (0.93, True)])
def test_a_share_that_leaves_others_too_little_is_lowered_and_the_plan_says_to_what(asked, told):
    chosen = {"engine.memory_fraction": asked}
    settings = settings_of(**chosen)
    _, profile = pair_of(settings, CATALOG)
    plan = plan_of(**chosen)
    text = "\n".join(summary_lines(plan, profile))
    said = f"lowered from {asked} to {plan.memory.memory_fraction:g}"
    assert (said in text, plan.memory.memory_fraction < asked) == (told, told)
