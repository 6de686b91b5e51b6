"""Ways to spell an option that the engine's parser accepts: none may pass a guard rail."""

import dataclasses
import shutil

import pytest
import yaml

from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.errors import CatalogError, PlanError, SettingsError
from spark_deploy.plan.engine_arguments import engine_arguments
from spark_deploy.plan.guard_rails import apply_rails, facts_of
from spark_deploy.plan.memory import plan_memory
from tests.unit.planning.plans import CATALOG, FIXTURE, LARGE, settings_of, whats

FLASHINFER = "flashinfer-decode"
PIECEWISE = {"compilation-config": {"cudagraph_mode": "PIECEWISE"}}


def refused_settings(options):
    with pytest.raises(SettingsError) as error:
        settings_of(**{"engine.options": options})
    return str(error.value)


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        ("device-memory-utilization", "engine.memory_fraction"),
        ("device_memory_utilization", "engine.memory_fraction"),
        ("gpu-memory-util", "gpu-memory-utilization"),
        ("max_num_batched_t", "max-num-batched-tokens"),
        ("enable-prefix", "enable-prefix-caching"),
        ("no-enable-prefix", "enable-prefix-caching"),
        ("no-language-model-only", "engine.vision"),
        ("kv-cache-dtyp", "kv-cache-dtype"),
        ("attention-b", "attention-backend"),
        ("spec-tok", "spec-tokens"),
        ("no-enforce-e", "enforce-eager"),
        ("num-gpu-blocks-override", "engine.kv_cache_gib"),
        ("config", "write its options out"),
        ("cpu-offload-gb", "one pool"),
        ("kv_offloading_size", "one pool"),
        ("kv_transfer_config", "found again"),
    ],
)
def test_other_names_of_a_decided_option_are_refused_with_the_way_to_it(option, fix):
    assert fix in refused_settings({option: True})


@pytest.mark.parametrize("option", ["seed", "max-logprobs", "enforce-eager", "no-async-scheduling"])
def test_options_that_nothing_decides_stay_free(option):
    assert whats(**{"engine.options": {option: True}}) == []


@pytest.mark.parametrize("value", ["two", [2], {"a": 1}, 1.5])
def test_a_parallel_size_that_is_no_whole_number_is_said_not_raised(value):
    message = refused_settings({"pipeline_parallel_size": value})
    assert "no whole number" in message
    assert "pipeline_parallel_size" in message


@pytest.mark.parametrize(
    ("profile", "options", "rule"),
    [
        ("v2", {"attention-config": ' {"backend": "FLASHINFER"}'}, FLASHINFER),
        ("v2", {"attention_config": '\n{"backend":"flashinfer"}'}, FLASHINFER),
        ("v2", {"attention_backend": "FlashInfer", "enforce-eager": "false"}, FLASHINFER),
        (
            "v2",
            {"attention-backend": "FLASHINFER", "enforce-eager": True, "no-enforce-eager": True},
            FLASHINFER,
        ),
        ("agent", {"spec-method": "mtp", "spec_tokens": 2}, "drafts-by-option"),
        ("agent", {"spec-method": "mtp", "spec_tokens": "2"}, "drafts-by-option"),
        ("base", {"spec-method": "dflash", "spec-model": "org/draft"}, "dflash"),
        ("base", {"spec_model": "org/draft"}, "draft-of-another-model"),
        ("v2", {"speculative-config": {"num_speculative_tokens": "many"}}, "drafts-by-option"),
        ("v2", {"pipeline-parallel-size": "2"}, "pipeline-parallel-with-drafts"),
        ("v2", {"linear-backend": "deep_gemm"}, "deep-gemm"),
        ("v2", {"moe_backend": "DEEP-GEMM"}, "deep-gemm"),
        ("v2", {"kernel-config": ' {"moe_backend": "deep_gemm"}'}, "deep-gemm"),
        ("base", {"hf-overrides": {"quantization_config": {"quant_method": "mxfp4"}}}, "nvfp4"),
        ("v2-native", {"additional-config": {"spark": {"lm_head": "int8-triton"}}}, "own-head-wi"),
    ],
)
def test_each_way_to_spell_it_meets_its_rail(profile, options, rule):
    found = whats(profile=profile, **{"engine.options": options})
    assert any(f"guard rail {rule}" in problem for problem in found), found


def facts(profile, model="large"):
    loaded = CATALOG.model(model)
    settings = settings_of()
    return facts_of(loaded, profile, plan_memory(loaded, profile, settings), settings)


def test_the_load_format_a_rail_sees_is_the_one_the_engine_gets():
    twice = dataclasses.replace(
        LARGE,
        sources=dataclasses.replace(LARGE.sources, repeats_names=True),
    )
    settings = settings_of()

    def refusals(load_format, option):
        profile = dataclasses.replace(
            CATALOG.profile("v2", "large"), load_format=load_format, options=option
        )
        try:
            memory = plan_memory(twice, profile, settings)
            apply_rails(CATALOG.rails, facts_of(twice, profile, memory, settings))
        except PlanError as error:
            return str(error)
        return ""

    assert "repeated-names" in refusals("fastsafetensors", {})
    assert "repeated-names" in refusals("safetensors", {"load_format": "fastsafetensors"})
    assert "repeated-names" in refusals("safetensors", {"load-format": "FastSafeTensors"})
    assert "repeated-names" in refusals("FASTSAFETENSORS", {})
    assert refusals("fastsafetensors", {"load-format": "safetensors"}) == ""
    assert refusals("fastsafetensors", {"load-format": None}) == ""


def test_a_bare_eager_flag_and_piecewise_graphs_in_json_text_still_count():
    for calm in (
        {"enforce_eager": True},
        {"compilation-config": ' {"cudagraph_mode": "PIECEWISE"}'},
    ):
        options = {"attention-backend": "FLASHINFER", **calm}
        assert whats(**{"engine.options": options}) == []


@pytest.mark.parametrize("value", ["0", "00", " 0"])
def test_turboquant_on_the_old_runner_is_refused(value):
    old = {"engine.environment": {"VLLM_USE_V2_MODEL_RUNNER": value}}
    [found] = whats(profile="v2-tq", **old)
    assert "guard rail turboquant-on-the-old-runner" in found
    assert whats(profile="v2", **old) == []
    new = {"engine.environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}
    assert whats(profile="v2-tq", **new) == []


@pytest.mark.parametrize("names", ["", "spark", "other,spark"])
def test_which_plugins_load_is_no_matter_of_the_environment(names):
    [found] = whats(**{"engine.environment": {"VLLM_PLUGINS": names}})
    assert "guard rail plugins-by-environment" in found
    free = whats(profile="v2-native", **{"engine.environment": {"VLLM_PLUGINS": names}})
    assert free == []


@pytest.fixture
def refused_profile(tmp_path):
    """Return what is said of profile v2 with some keys changed."""
    copy = tmp_path / "checkout"
    shutil.copytree(FIXTURE, copy)

    def refused(**change):
        path = copy / "catalog/profiles/v2.yml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
        with pytest.raises(CatalogError) as error:
            read_catalog(copy).profile("v2", "large")
        return str(error.value)

    return refused


@pytest.mark.parametrize("option", ["max-num-seqs", "device_memory_utilization", "spec-tok"])
def test_a_profile_of_ones_own_cannot_decide_them_by_option_either(option, refused_profile):
    assert f"options.{option}" in refused_profile(options={option: 9})


@pytest.mark.parametrize(
    "dtype", ["TurboQuant_k8v4", "FP8", "int8_per_token_head", "nvfp4", "turboquant"]
)
def test_a_cache_whose_bytes_the_plan_cannot_count_is_refused(dtype, refused_profile):
    message = refused_profile(kv_cache={"dtype": dtype})
    assert dtype in message
    assert "turboquant_k8v4" in message


def test_further_options_as_json_text_are_joined_with_the_heads():
    model = LARGE
    settings = settings_of()
    own = dataclasses.replace(CATALOG.profile("v2", "large"), head="int8-triton")

    def argv(value):
        profile = dataclasses.replace(own, options={"additional-config": value})
        return " ".join(
            engine_arguments(model, profile, plan_memory(model, profile, settings), ("m",))
        )

    assert '"gdn_prefill_backend":"triton","spark":{"lm_head"' in argv(
        '{"gdn_prefill_backend": "triton"}'
    )
    with pytest.raises(PlanError, match="additional-config"):
        argv("triton")
