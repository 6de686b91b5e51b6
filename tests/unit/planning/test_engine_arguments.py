import json
import re
from dataclasses import replace

import pytest

from spark_deploy.config.catalog.architecture import RepoMetadata
from spark_deploy.config.catalog.model import PlainModel
from spark_deploy.config.errors import PlanError
from spark_deploy.plan.engine_arguments import (
    HEAD_TIMINGS_PATH,
    TRITON_EXPERTS_LINE,
    engine_arguments,
    engine_options,
    option_arguments,
    pins_drafter_experts,
    pins_target_experts,
    prefill_line,
    required_and_forbidden_lines,
)
from spark_deploy.plan.memory import plan_memory
from spark_deploy.plan.resolve import with_drafts
from spark_deploy.plan.types import HostPlan
from tests.unit.planning.plans import CATALOG, LARGE, settings_of, shipped_catalog, shipped_plan

SHIPPED, MODEL = shipped_catalog(), "qwen3.5-122b"
V2 = CATALOG.profile("v2", "large")
OWN_HEAD = replace(V2, head="int8-triton")
PLAIN = SHIPPED.profile("plain", "qwen3-4b")


def argv(profile="v2", **changes):
    if isinstance(profile, str):
        profile = CATALOG.profile(profile, "large")
    profile = replace(profile, **changes)
    memory = plan_memory(LARGE, profile, settings_of())
    return engine_arguments(LARGE, profile, memory, ["first", "second"])


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
def test_options_become_unquoted_arguments(options, arguments):
    assert option_arguments(options) == arguments


@pytest.mark.parametrize("options", [{"a": "-x"}, {"a": -1}, {"a": ["b", "--c"]}])
def test_rejects_value_that_looks_like_an_option(options):
    with pytest.raises(PlanError, match="begins with '-'"):
        option_arguments(options)


def test_engine_serves_all_model_names_in_order():
    arguments = argv()
    start = arguments.index("--served-model-name")
    assert arguments[start + 1 : start + 3] == ("first", "second")
    assert arguments[start + 3].startswith("--")


NOT_TUNED = {"enable_flashinfer_autotune": False, "enable_jit_warmup": False}


@pytest.mark.parametrize(
    ("options", "kernel_config"),
    [
        ({}, NOT_TUNED),
        ({"kernel-config": {"moe_backend": "marlin"}}, {**NOT_TUNED, "moe_backend": "marlin"}),
        (
            {"kernel_config": '{"enable_jit_warmup": true}'},
            {**NOT_TUNED, "enable_jit_warmup": True},
        ),
        # The engine refuses option and key together.
        ({"enable-flashinfer-autotune": True}, {"enable_jit_warmup": False}),
        ({"no_enable_flashinfer_autotune": True}, {"enable_jit_warmup": False}),
        ({"kernel-config": None}, None),
    ],
)
def test_disables_kernel_tuning_unless_options_enable_it(options, kernel_config):
    arguments = argv(options=options)
    assert arguments.count("--kernel-config") == (kernel_config is not None)
    if kernel_config is not None:
        assert json.loads(value_of(arguments, "--kernel-config")) == kernel_config


@pytest.mark.parametrize("option", ["kernel-config", "additional-config"])
def test_rejects_option_that_is_not_a_mapping(option):
    with pytest.raises(PlanError) as error:
        argv(OWN_HEAD, options={option: "auto"})
    assert error.value.problems[0].where == f"engine option {option}"


@pytest.mark.parametrize(
    ("options", "added"),
    [
        ({}, {}),
        (
            {"gdn_prefill_backend": "triton", "spark": {"lm_head_kernel": "own"}},
            {"gdn_prefill_backend": "triton", "spark": {"lm_head_kernel": "own"}},
        ),
        ('{"gdn_prefill_backend": "triton"}', {"gdn_prefill_backend": "triton"}),
    ],
)
def test_lm_head_setting_is_merged_into_additional_config(options, added):
    chosen = {"additional-config": options} if options else {}
    merged = json.loads(value_of(argv(OWN_HEAD, options=chosen), "--additional-config"))
    spark = {"lm_head": "int8-triton", "lm_head_times": HEAD_TIMINGS_PATH, **added.get("spark", {})}
    assert merged == {**added, "spark": spark}
    assert "--additional-config" not in argv()


TRITON_EXPERTS = (
    "INFO [unquantized.py:298] Using TRITON Unquantized MoE backend out of potential backends: "
    "['FlashInfer TRTLLM', 'FlashInfer CUTLASS', 'TRITON', 'BATCHED_TRITON']."
)


def test_required_log_line_matches_only_the_pinned_kernel():
    assert re.search(TRITON_EXPERTS_LINE, TRITON_EXPERTS)
    assert re.search(TRITON_EXPERTS_LINE, "Using TRITON Unquantized MoE LoRA backend")
    for other in ("FlashInfer CUTLASS", "BATCHED_TRITON"):
        line = TRITON_EXPERTS.replace("TRITON U", f"{other} U", 1)
        assert not re.search(TRITON_EXPERTS_LINE, line)


def plain(**metadata):
    return PlainModel(
        name="x", kind="plain", summary="x", choose_when="x", repository="org/x",
        metadata=RepoMetadata(repository="org/x", commit="0" * 40, **metadata),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "pinned"),
    [
        (plain(expert_width=768), True),
        (plain(expert_width=768, quantization="fp8"), False),
        (plain(), False),
        (replace(plain(), metadata=None), False),
    ],
    ids=["16-bit experts", "quantised experts", "dense", "unknown"],
)
def test_pins_the_kernel_only_for_16_bit_experts(model, pinned):
    assert pins_drafter_experts(model, with_drafts(SHIPPED.profile("v2", MODEL), 2)) is pinned
    assert pins_target_experts(model, PLAIN) is pinned


@pytest.mark.parametrize(("width", "backend"), [(768, "triton"), (None, None)])
def test_kernel_pinned_for_the_target_model_is_set_and_must_be_used(width, backend):
    model = plain(expert_width=width, context_tokens=4096)
    plan = shipped_plan("qwen3-4b", "plain")
    assert isinstance(plan, HostPlan)
    options = engine_options(model, PLAIN, plan.memory)
    assert options.get("moe-backend") == backend
    required, _ = required_and_forbidden_lines(model, PLAIN, plugin=False)
    assert (TRITON_EXPERTS_LINE in required) is (backend is not None)


@pytest.mark.parametrize(
    "change",
    [
        {"options": {"moe-backend": "auto"}},
        {"options": {"kernel_config": '{"moe_backend": "flashinfer_cutlass"}'}},
        {"options": {"quantization": "fp8"}},
        {"options": {"quantization-config": {}}},
        {"options": {"model-impl": "transformers"}},
        {"engine_mode": "portable"},
    ],
)
def test_options_and_portable_mode_disable_pinning(change):
    model, profile = plain(expert_width=768), replace(PLAIN, **change)
    assert not pins_target_experts(model, profile)
    assert TRITON_EXPERTS_LINE not in required_and_forbidden_lines(model, profile, plugin=False)[0]


def test_does_not_pin_kernels_of_separate_or_portable_drafters():
    profile = SHIPPED.profile("v2", MODEL)
    for changed in (
        replace(profile, speculation=replace(profile.speculation, repository="org/drafter")),
        replace(profile, speculation=None),
        replace(profile, engine_mode="portable"),
    ):
        assert not pins_drafter_experts(SHIPPED.model(MODEL), changed)
        assert (
            TRITON_EXPERTS_LINE
            not in required_and_forbidden_lines(SHIPPED.model(MODEL), changed, plugin=True)[0]
        )


TRITON_PREFILL = (
    "INFO [qwen_gdn.py:178] Using Triton/FLA GDN prefill kernel (requested=triton, head_k_dim=128)."
)
FLASHINFER_PREFILL = (
    "INFO [qwen_gdn.py:178] Using FlashInfer GDN prefill kernel (requested=auto, head_k_dim=128)."
)
PREFILL = {
    name: lines
    for name in SHIPPED.profile_names
    if (lines := prefill_line(SHIPPED.model(MODEL), SHIPPED.profile(name, MODEL)))
}


def test_check_requires_prefill_kernel_of_profile():
    assert "v2" in PREFILL
    for name, [pattern] in PREFILL.items():
        assert re.search(pattern, TRITON_PREFILL), name
        assert not re.search(pattern, FLASHINFER_PREFILL), name
        fallback = TRITON_PREFILL.replace("requested=triton", "requested=auto")
        assert not re.search(pattern, fallback), name
    model, profile = SHIPPED.model(MODEL), SHIPPED.profile("v2", MODEL)
    dense = replace(model.architecture, full_attention_every=1)
    assert prefill_line(replace(model, architecture=dense), profile) == []
