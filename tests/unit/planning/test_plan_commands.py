import dataclasses
import json
import re

import pytest

from spark_deploy.config.errors import PlanError
from spark_deploy.plan.engine_arguments import (
    engine_arguments,
    engine_environment,
    option_arguments,
)
from spark_deploy.plan.memory import plan_memory
from tests.unit.planning.plans import CATALOG, LARGE, settings_of


def argv(profile="v2", **changes):
    settings = settings_of()
    chosen = dataclasses.replace(CATALOG.profile(profile, "large"), **changes)
    memory = plan_memory(LARGE, chosen, settings)
    return engine_arguments(LARGE, chosen, memory, ["first", "second"])


def value_of(arguments, flag):
    return arguments[arguments.index(flag) + 1]


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"seed": 1}, ["--seed", "1"]),
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"async-scheduling": False}, ["--no-async-scheduling"]),
        ({"seed": None}, []),
        ({"a": {"y": 1, "x": "b c"}}, ["--a", '{"x":"b c","y":1}']),
        ({"a": ["x", 2]}, ["--a", "x", "2"]),
        ({"a": "with space; rm -rf"}, ["--a", "with space; rm -rf"]),
    ],
)
def test_options_become_arguments_without_any_quoting(options, arguments):
    assert option_arguments(options) == arguments


@pytest.mark.parametrize("options", [{"a": "-x"}, {"a": -1}, {"a": ["b", "--c"]}])
def test_a_value_that_would_be_read_as_an_option_is_refused(options):
    with pytest.raises(PlanError, match="begins with '-'"):
        option_arguments(options)


def test_all_names_are_served_the_first_one_first():
    arguments = argv()
    at = arguments.index("--served-model-name")
    assert arguments[at + 1 : at + 3] == ("first", "second")
    assert arguments[at + 3].startswith("--")


def test_v2_drafts_two_tokens_and_never_caches_prefixes():
    arguments = argv()
    drafts = json.loads(value_of(arguments, "--speculative-config"))
    assert drafts == {"method": "mtp", "moe_backend": "triton", "num_speculative_tokens": 2}
    assert "--no-enable-prefix-caching" in arguments
    assert value_of(arguments, "--gpu-memory-utilization") == "0.8"


def test_v2_tq_compresses_the_cache_of_four_sequences_with_drafts():
    arguments = argv("v2-tq")
    assert value_of(arguments, "--kv-cache-dtype") == "turboquant_k8v4"
    assert value_of(arguments, "--max-num-seqs") == "4"
    assert "--speculative-config" in arguments


def test_agent_caches_prefixes_and_never_drafts():
    arguments = argv("agent")
    assert "--enable-prefix-caching" in arguments
    assert "--speculative-config" not in arguments


def test_online_fp8_names_the_modules_the_engine_has_to_quantise():
    targets = json.loads(value_of(argv("online-fp8"), "--quantization-config"))["targets"]
    [pattern] = [target.removeprefix("re:") for target in targets]
    layer = "language_model.model.layers.47.mlp"
    assert re.match(pattern, f"{layer}.shared_expert.gate_proj")
    for other in (f"{layer}.shared_expert_gate", "mtp.layers.0.mlp.shared_expert.up_proj"):
        assert not re.match(pattern, other)


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ({}, {"enable_flashinfer_autotune": False, "enable_jit_warmup": False}),
        (
            {"kernel-config": {"moe_backend": "marlin"}},
            {
                "enable_flashinfer_autotune": False,
                "enable_jit_warmup": False,
                "moe_backend": "marlin",
            },
        ),
        (
            {"kernel_config": '{"enable_jit_warmup": true}'},
            {"enable_flashinfer_autotune": False, "enable_jit_warmup": True},
        ),
        # The engine refuses the option together with its key.
        ({"enable-flashinfer-autotune": True}, {"enable_jit_warmup": False}),
        ({"no_enable_flashinfer_autotune": True}, {"enable_jit_warmup": False}),
        ({"kernel-config": None}, None),
    ],
)
def test_kernels_are_neither_tuned_nor_warmed_up_unless_the_owner_asks_for_it(own, found):
    arguments = argv(options=own)
    assert arguments.count("--kernel-config") == (found is not None)
    if found is not None:
        assert json.loads(value_of(arguments, "--kernel-config")) == found


def test_a_kernel_config_of_another_form_is_refused():
    with pytest.raises(PlanError) as refused:
        argv(options={"kernel-config": "auto"})
    assert refused.value.problems[0].where == "engine option kernel-config"


def test_vision_drops_the_text_only_flag():
    assert "--language-model-only" in argv()
    assert "--language-model-only" not in argv(vision=True)


def test_an_option_of_the_user_replaces_one_of_the_profile():
    arguments = argv(options={"load_format": "safetensors"})
    assert arguments.count("--load-format") == 1
    assert value_of(arguments, "--load-format") == "safetensors"


def test_no_argument_names_a_quantization_and_the_socket_is_the_only_door():
    for profile in ("v2", "v2-tq", "base"):
        arguments = argv(profile)
        assert not {"--quantization", "--port", "--host", "--api-key"} & set(arguments)
        assert value_of(arguments, "--uds") == "/run/spark/engine.sock"


def test_the_environment_names_the_plugin_only_where_it_is_installed():
    profile = CATALOG.profile("v2", "large")
    with_plugin = engine_environment(profile, plugin=True, start_timeout_s=60, image="i")
    assert with_plugin["VLLM_PLUGINS"] == "spark"
    assert "VLLM_PLUGINS" not in engine_environment(
        profile, plugin=False, start_timeout_s=60, image="i"
    )
    assert with_plugin["HF_HUB_OFFLINE"] == "1"


def test_the_sampler_is_that_of_the_proofs_and_compilers_take_two_cores():
    made = engine_environment(
        CATALOG.profile("v2", "large"), plugin=False, start_timeout_s=60, image="i"
    )
    wanted = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "MAX_JOBS": "2",
        "FLASHINFER_NVCC_THREADS": "1",
    }
    assert wanted.items() <= made.items()
