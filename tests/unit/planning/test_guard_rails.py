import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import CatalogError, PlanError, SettingsError
from spark_deploy.config.settings.engine import OWNED_OPTIONS
from spark_deploy.hosts.payload import supported_engines
from spark_deploy.plan.engine_arguments import engine_options
from spark_deploy.plan.guard_rails import apply_rails, model_profile_problems, release_facts
from spark_deploy.plan.memory import plan_memory
from spark_deploy.plan.resolve import plan_problems, resolve
from tests.unit.planning.plans import (
    CATALOG,
    FIXTURE,
    LARGE,
    plan_of,
    problem_texts,
    problems,
    settings_of,
    shipped_catalog,
)

RAILS = shipped_catalog().rails
V2 = CATALOG.profile("v2", "large")
NATIVE_CONTEXT = LARGE.architecture.max_context_tokens


def facts(profile, model=LARGE, **settings):
    chosen = settings_of(**settings)
    return release_facts(model, profile, plan_memory(model, profile, chosen), chosen)


CALM = {**facts(V2), "speculation_method": None, "speculation_tokens": 0}
TQ = {"kv_cache": "turboquant_k8v4", "max_sequences": 1}
STOCK = {"plugin": False, "checkpoint_needs_plugin": False}
TRIPS: dict[str, dict[str, Any]] = {
    "turboquant-with-drafts": {**TQ, **STOCK, "speculation_tokens": 2},
    "turboquant-with-several-sequences": {**TQ, **STOCK, "max_sequences": 2},
    "turboquant-with-prefix-caching": {**TQ, **STOCK, "prefix_caching": True},
    "turboquant-with-attention-backend": {**TQ, "has_attention_backend": True},
    "turboquant-on-the-old-runner": {**TQ, "old_runner": True},
    "turboquant-three-bit-keys": {"kv_cache": "turboquant_3bit_nc", "max_sequences": 1},
    "turboquant-four-bit-keys": {"kv_cache": "turboquant_4bit_nc", "max_sequences": 1},
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
    "dflash": {"speculation_method": "dflash", "speculation_tokens": 8, "drafts_by_option": True},
    "draft-of-another-model": {"separate_draft_model": True, "drafts_by_option": True},
    "drafter-of-a-repository": {"separate_draft_model": True},
    "drafts-by-option": {"drafts_by_option": True},
    "one-gpu-in-a-host": {"devices": 2},
    "ray": {"executor": "ray"},
    "pipeline-parallel-with-drafts": {"pipeline_stages": 2, "speculation_tokens": 2},
    "drafts-on-several-hosts": {"hosts": 2, "speculation_tokens": 1},
    "experts-of-one-group": {"expert_width_per_device": 128},
    "prefixes-on-a-pair-of-397b": {"model": "qwen3.5-397b", "hosts": 2, "prefix_caching": True},
    "nvfp4": {"formats": "org/model-nvfp4"},
    "prefixes-with-sparse-attention": {"sparse_attention": True, "prefix_caching": True},
    "fp8-cache-with-sparse-attention": {"sparse_attention": True, "kv_cache": "fp8_e4m3"},
    "sparse-attention-repeats": {"sparse_attention": True},
    "drafts-that-split-the-ring": {"ring_fits_block": False},
    "deep-gemm": {"deep_gemm": True},
    "marlin-atomic-add": {"atomic_add": True},
    "ignored-variables": {"unread_variables": True},
    "stretched-context": {"stretched_context": True},
    "repeated-names-with-fastsafetensors": {"checkpoint_repeats_names": True},
    "plugin-tree-on-the-plain-engine": {"plugin": False},
    "plugins-by-environment": {"plugins_by_environment": True},
    "own-head-without-the-plugin": {
        **STOCK,
        "head": "int8-triton",
        "checkpoint_needs_plugin": True,
    },
    "own-head-with-a-plain-tree": {"head": "int8-triton", "checkpoint_needs_plugin": False},
    "portable-mode-with-a-plain-tree": {
        "engine_mode": "portable",
        "checkpoint_needs_plugin": False,
    },
    "draft-vocabulary-without-our-head": {"draft_vocabulary": 32768},
    "draft-vocabulary-with-sparse-attention": {
        "draft_vocabulary": 32768,
        "head": "int8-triton",
        "sparse_attention": True,
        "checkpoint_needs_plugin": True,
    },
    "draft-vocabulary-on-several-hosts": {
        "draft_vocabulary": 32768,
        "head": "int8-triton",
        "hosts": 2,
        "checkpoint_needs_plugin": True,
    },
    "draft-settings-without-effect": {"unused_draft_settings": ("engine.draft_vocabulary_text",)},
    "online-fp8-with-the-plugin": {"online_quantization": True},
    "open-network-without-tls": {"expose": "lan"},
    "trust-remote-code": {"trust_remote_code": True},
    "unlisted-option": {"unlisted_options": ("options.worker-cls",)},
    "insecure-serialization": {"unpickles": True},
    "pickled-weights": {"load_format": "pt"},
    "docker-on-the-network": {"docker_listens": True},
    "questions-in-the-journal": {"questions_logged": True},
    "no-background-compaction": {"compaction_proactiveness": 0},
    "engine-that-needs-dropped-caches": {**STOCK, "engine_counts_cache_as_used": True},
}


def with_options(profile="v2", **options):
    return problem_texts(profile=profile, **{"engine.options": options})


def test_every_guard_rail_has_a_test_case():
    assert set(TRIPS) == {rail.rule for rail in RAILS}


@pytest.mark.parametrize("rule", TRIPS)
def test_guard_rail_applies_only_to_its_combination_of_settings(rule):
    [rail] = [rail for rail in RAILS if rail.rule == rule]
    assert apply_rails([rail], CALM) == ()
    if rail.effect == "warn":
        [warning] = apply_rails([rail], {**CALM, **TRIPS[rule]})
        assert warning.startswith(rule)
    else:
        with pytest.raises(PlanError, match=f"guard rail {rule}"):
            apply_rails([rail], {**CALM, **TRIPS[rule]})


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_warns_about_a_drafter_repository_on_a_hybrid_model(method):
    drafts = {"speculation_method": method, "speculation_tokens": 3, "separate_draft_model": True}
    warnings = apply_rails(RAILS, {**CALM, **drafts})
    assert [warning.partition(":")[0] for warning in warnings] == ["drafter-of-a-repository"]


def test_evidence_named_by_each_guard_rail_exists():
    results = CHECKOUT / "proofs/results"
    for rail in RAILS:
        if rail.evidence == "measured":
            files = re.findall(r"[\w./-]+\.json", rail.source)
            assert files, rail.rule
            assert all([*results.rglob(Path(name).name)] for name in files), rail.rule
        elif rail.evidence == "read":
            pattern = r"[\w./-]+/[\w./-]*|\w+\.py|metadata|source|socket|hardware"
            names = re.findall(pattern, rail.source)
            assert names, rail.rule
            ours = [
                n for n in names if n.startswith(("files/", "spark_deploy/", "docs/", "catalog/"))
            ]
            assert all((CHECKOUT / name).exists() for name in ours), rail.rule
        else:
            assert re.search(r"#\d+|community|warnings of", rail.source), rail.rule


def test_rejects_guard_rail_about_an_unknown_fact():
    misspelt = replace(CATALOG.rails[0], applies={"kv_cach": {"is": "auto"}})
    [problem] = plan_problems(settings_of(), replace(CATALOG, rails=(misspelt,)))
    assert problem.where == f"catalog/guard_rails.yml: {misspelt.rule}: kv_cach"
    assert problem.fix == "did you mean kv_cache?"


def test_reports_all_rejections_together():
    options = {"attention-backend": "FLASH_ATTN", "pipeline_parallel_size": 2}
    assert len(with_options("v2-tq", **options)) == 3


LOGGED = "questions-in-the-journal"
WARNINGS: list[tuple[str, dict[str, Any], bool]] = [
    ("ignored-variables", {"engine.environment": {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}}, True),
    ("ignored-variables", {"engine.environment": {"VLLM_USE_V1": "1", "MAX_JOBS": "4"}}, True),
    ("ignored-variables", {"engine.environment": {"VLLM_USE_FLASHINFER_SAMPLER": "0"}}, False),
    ("marlin-atomic-add", {"engine.environment": {"VLLM_MARLIN_USE_ATOMIC_ADD": "1"}}, True),
    ("open-network-without-tls", {"serve.expose": "lan"}, True),
    ("open-network-without-tls", {"serve.expose": "lan", "serve.tls": "private-ca"}, False),
    ("open-network-without-tls", {"serve.expose": "tailscale"}, False),
    ("open-network-without-tls", {"serve.expose": "docker"}, False),
    (LOGGED, {"engine.options": {"enable-log-requests": True}}, True),
    (LOGGED, {"engine.options": {"enable_log_outputs": True}}, True),
    (LOGGED, {"engine.environment": {"VLLM_LOGGING_LEVEL": "debug"}}, True),
    (LOGGED, {"engine.environment": {"VLLM_REQUEST_BODY_LOG_LEVEL": "INFO"}}, True),
    (LOGGED, {"engine.options": {"no-enable-log-requests": True}}, False),
    (LOGGED, {"engine.options": {"enable-log-requests": False}}, False),
    (LOGGED, {"engine.environment": {"VLLM_LOGGING_LEVEL": "WARNING"}}, False),
    (LOGGED, {}, False),
]


@pytest.mark.parametrize(("rule", "settings", "warned"), WARNINGS)
def test_warns_about_risky_settings(rule, settings, warned):
    warnings = resolve(settings_of(**settings), CATALOG).warnings
    assert any(text.startswith(rule) for text in warnings) is warned


@pytest.mark.parametrize(
    ("image", "unproven"),
    [
        ("vllm/vllm-openai:v0.33.0", False),
        ("vllm/vllm-openai:v0.34.1", False),
        ("vllm/vllm-openai:v0.32.0", True),
        ("registry.lan/engine:ours", False),
    ],
)
def test_warns_about_prefix_caching_with_drafts_on_older_engines(image, unproven):
    agent = CATALOG.profile("agent", "large")
    assert facts(agent, **{"images.engine": image})["engine_prefixes_unproven"] is unproven


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
def test_rejects_experts_with_a_single_scale_group(model, options, refused, profile):
    texts = problem_texts(model, profile, **{"engine.options": options})
    assert any("experts-of-one-group" in text for text in texts) is refused
    assert any("one-gpu-in-a-host" in text for text in texts)


@pytest.mark.parametrize(
    ("image", "refused"),
    [
        ("vllm/vllm-openai:v0.24.0", True),
        ("vllm/vllm-openai:v0.9.2-aarch64", True),
        ("vllm/vllm-openai:v0.25.0", False),
        ("nvcr.io/nvidia/vllm:25.09-py3", False),
        (f"vllm/vllm-openai@sha256:{'0' * 64}", False),
    ],
)
def test_rejects_engines_that_count_page_cache_as_used(image, refused):
    for profile in ("v2-native", "online-fp8", "base", "v2"):
        texts = problem_texts(profile=profile, **{"images.engine": image})
        expected = [True] * (refused and profile != "v2")
        assert ["engine-that-needs-dropped-caches" in text for text in texts] == expected


RUNNER, PLUGINS = "VLLM_USE_V2_MODEL_RUNNER", "VLLM_PLUGINS"


@pytest.mark.parametrize(
    ("profile", "environment", "rule", "unaffected"),
    [
        ("v2", {"VLLM_USE_DEEP_GEMM": "1"}, "deep-gemm", None),
        *(("v2-tq", {RUNNER: value}, "turboquant-on-the-old-runner", "v2")
          for value in ("0", "00", " 0")),
        *(("v2", {PLUGINS: names}, "plugins-by-environment", "v2-native")
          for names in ("", "spark", "other,spark")),
    ],
)  # fmt: skip
def test_guard_rails_read_environment_variables(profile, environment, rule, unaffected):
    settings = {"engine.environment": environment}
    [text] = problem_texts(profile=profile, **settings)
    assert f"guard rail {rule}" in text
    assert unaffected is None or problem_texts(profile=unaffected, **settings) == []


def test_accepts_new_model_runner_with_turboquant():
    assert problem_texts(profile="v2-tq", **{"engine.environment": {RUNNER: "1"}}) == []


# Options: vLLM's parser accepts many spellings, and none may bypass a rule.


@pytest.mark.parametrize(
    ("profile", "options", "rule"),
    [
        ("v2", {"speculative-config": {"method": "dflash", "model": "org/draft"}}, "dflash"),
        ("v2", {"speculative_config": '{"method": "mtp", "model": "x/y"}'},
         "draft-of-another-model"),
        ("v2", {"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}},
         "drafts-by-option"),
        ("v2", {"speculative-config": {"num_speculative_tokens": "many"}}, "drafts-by-option"),
        ("agent", {"spec-method": "mtp", "spec_tokens": 2}, "drafts-by-option"),
        ("agent", {"spec-method": "mtp", "spec_tokens": "2"}, "drafts-by-option"),
        ("base", {"spec-method": "dflash", "spec-model": "org/draft"}, "dflash"),
        ("base", {"spec_model": "org/draft"}, "draft-of-another-model"),
        ("v2", {"pipeline-parallel-size": 2}, "pipeline-parallel-with-drafts"),
        ("v2", {"pipeline-parallel-size": "2"}, "pipeline-parallel-with-drafts"),
        ("v2", {"tensor-parallel-size": 2}, "one-gpu-in-a-host"),
        ("v2", {"tensor_parallel_size": "2"}, "one-gpu-in-a-host"),
        ("v2", {"data-parallel-size": 2}, "one-gpu-in-a-host"),
        ("v2", {"nnodes": 2}, "one-gpu-in-a-host"),
        ("v2", {"distributed-executor-backend": "ray"}, "ray"),
        ("v2", {"distributed_executor_backend": "Ray"}, "ray"),
        ("v2", {"quantization-config": {"targets": {"re:x": "nvfp4"}}}, "nvfp4"),
        ("base", {"hf-overrides": {"quantization_config": {"quant_method": "mxfp4"}}}, "nvfp4"),
        ("v2", {"quantization-config": {"targets": {"re:x": "fp8_per_block"}}},
         "online-fp8-with"),
        ("v2", {"attention-backend": "FLASHINFER"}, "flashinfer-decode"),
        ("v2", {"attention_backend": "FLASHINFER"}, "flashinfer-decode"),
        ("v2", {"attention-config": {"backend": "flashinfer"}}, "flashinfer-decode"),
        ("v2", {"attention-config": ' {"backend": "FLASHINFER"}'}, "flashinfer-decode"),
        ("v2", {"attention_config": '\n{"backend":"flashinfer"}'}, "flashinfer-decode"),
        ("v2", {"attention_backend": "FlashInfer", "enforce-eager": "false"},
         "flashinfer-decode"),
        ("v2", {"attention-backend": "FLASHINFER", "enforce-eager": True,
                "no-enforce-eager": True}, "flashinfer-decode"),
        ("v2", {"linear-backend": "deep_gemm"}, "deep-gemm"),
        ("v2", {"moe_backend": "DEEP-GEMM"}, "deep-gemm"),
        ("v2", {"kernel-config": ' {"moe_backend": "deep_gemm"}'}, "deep-gemm"),
        ("v2-native", {"additional-config": {"spark": {"lm_head": "int8-triton"}}},
         "own-head-wi"),
    ],
)  # fmt: skip
def test_guard_rails_recognize_every_option_spelling(profile, options, rule):
    texts = with_options(profile, **options)
    assert any(f"guard rail {rule}" in text for text in texts), texts


@pytest.mark.parametrize(
    "options",
    [
        *({option: True} for option in ("seed", "max-logprobs", "enforce-eager",
                                        "no-async-scheduling")),
        {"tensor-parallel-size": 1}, {"data-parallel-size": "1"},
        {"distributed-executor-backend": "mp"},
        {"attention-backend": "FLASHINFER", "enforce_eager": True},
        {"attention-backend": "FLASHINFER",
         "compilation-config": ' {"cudagraph_mode": "PIECEWISE"}'},
    ],
)  # fmt: skip
def test_accepts_harmless_options(options):
    assert with_options(**options) == []


def refused_settings(option, value=True):
    with pytest.raises(SettingsError) as error:
        settings_of(**{"engine.options": {option: value}})
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
        ("config", "options"),
        ("cpu-offload-gb", "remove it"),
        ("kv_offloading_size", "remove it"),
        ("kv_transfer_config", "remove it"),
    ],
)
def test_rejects_aliases_of_options_that_are_set_elsewhere(option, fix):
    assert fix in refused_settings(option)


@pytest.mark.parametrize("value", ["two", [2], {"a": 1}, 1.5])
def test_rejects_parallel_size_that_is_not_an_integer(value):
    message = refused_settings("pipeline_parallel_size", value)
    assert "is not a whole number" in message
    assert "pipeline_parallel_size" in message


def test_users_can_override_a_planned_option_only_if_it_is_listed():
    options = engine_options(LARGE, V2, plan_memory(LARGE, V2, settings_of()))
    free = {"load-format", "reasoning-parser", "enable-auto-tool-choice", "tool-call-parser"}
    free |= {"disable-access-log-for-endpoints", "chat-template"}
    checked_by_rules = {"speculative-config", "kernel-config"}
    assert set(options) - set(OWNED_OPTIONS) == free | checked_by_rules


@pytest.mark.parametrize(
    ("load_format", "options", "refused"),
    [
        ("fastsafetensors", {}, True),
        ("FASTSAFETENSORS", {}, True),
        ("safetensors", {"load_format": "fastsafetensors"}, True),
        ("safetensors", {"load-format": "FastSafeTensors"}, True),
        ("fastsafetensors", {"load-format": "safetensors"}, False),
        ("fastsafetensors", {"load-format": None}, False),
    ],
)
def test_guard_rails_read_the_effective_load_format(load_format, options, refused):
    model = replace(LARGE, sources=replace(LARGE.sources, repeats_names=True))
    own = facts(replace(V2, load_format=load_format, options=options), model)
    if not refused:
        apply_rails(CATALOG.rails, own)
        return
    with pytest.raises(PlanError, match="repeated-names"):
        apply_rails(CATALOG.rails, own)


@pytest.fixture
def refused_profile(tmp_path):
    """Return a function that changes keys of profile v2 and returns the error."""
    checkout = Path(shutil.copytree(FIXTURE, tmp_path / "checkout"))
    path = checkout / "catalog/profiles/v2.yml"

    def error_of(**change):
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
        with pytest.raises(CatalogError) as error:
            read_catalog(checkout).profile("v2", "large")
        return str(error.value)

    return error_of


@pytest.mark.parametrize("option", ["max-num-seqs", "device_memory_utilization", "spec-tok"])
def test_rejects_profile_options_that_have_their_own_setting(option, refused_profile):
    assert f"options.{option}" in refused_profile(options={option: 9})


@pytest.mark.parametrize(
    "dtype", ["TurboQuant_k8v4", "FP8", "int8_per_token_head", "nvfp4", "turboquant"]
)
def test_rejects_cache_types_with_unknown_size(dtype, refused_profile):
    message = refused_profile(kv_cache={"dtype": dtype})
    assert dtype in message
    assert "turboquant_k8v4" in message


# Third-party code: refused unless the owner overrides the rule by name.

WHY = "reviewed by us in November"
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "trust-remote-code": [
        {"trust-remote-code": True},
        {"trust_remote_code": True},
        {"trust-remote-code": "true"},
    ],
    "unlisted-option": [
        {"worker-cls": "ours.Worker"},
        {"worker_extension_cls": "ours.Worker"},
        {"scheduler-cls": "ours.Scheduler"},
        {"logits-processors": ["ours:Processor"]},
        {"io-processor-plugin": "ours"},
        {"reasoning-parser-plugin": "/model/parser.py"},
        {"tool-parser-plugin": "/vllm-workspace/parser.py"},
        {"middleware": ["ours.middleware"]},
        {"model-class-overrides": {"A": "ours:B"}},
        {"distributed-executor-backend": "ours.Executor"},
        {"compilation-config": {"backend": "ours.backend"}},
        {"compilation-config": '{"backend": "ours.backend"}'},
        {"compilation-config": {"inductor_passes": {"post_grad_pass": "ours.run"}}},
        {"compilation-config": {"pass_config": {"ours": True}}},
        {"structured_outputs_config": {"reasoning_parser_plugin": "/model/parser.py"}},
        {"ec-transfer-config": {"ec_connector_module_path": "ours.connector"}},
        {"additional-config": {"spark": {"lm_head_times": "/tmp/x"}}},
        {"compilation-config": '{"a":' * 9000},
        {"no-such-switch": True},
        {"max-logprobs": "ours.module"},
        {"max-logprobs": ["/cache/x.so"]},
        {"seed": {"a": 1}},
    ],
    "pickled-weights": [{"load-format": "pt"}, {"load_format": "NpCache"}],
}
VARIABLES = {
    "VLLM_LOGGING_CONFIG_PATH": "/model/logging.json",
    "VLLM_NCCL_SO_PATH": "libours.so",
    "VLLM_USE_RUST_FRONTEND": "1",
    "NCCL_NET_PLUGIN": "ours",
    "CUDA_INJECTION64_PATH": "/model/libours.so",
    "OMP_TOOL_LIBRARIES": "/model/libours.so",
    "CC": "ours",
    "TRITON_PTXAS_PATH": "/model/ptxas",
    "OPENSSL_CONF": "/model/openssl.cnf",
    "NCCL_IB_HCA": "/model/libours.so",
    "A_NEW_SWITCH": "1",
}
UNTRUSTED = [
    *((rule, {"engine.options": o}) for rule, options in OPTIONS.items() for o in options),
    ("insecure-serialization", {"engine.environment": {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}}),
    ("insecure-serialization", {"engine.environment": {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "y"}}),
    *(
        ("unlisted-option", {"engine.environment": {name: value}})
        for name, value in VARIABLES.items()
    ),
    ("docker-on-the-network", {"docker.daemon": {"hosts": ["fd://", "tcp://0.0.0.0:2375"]}}),
    ("docker-on-the-network", {"docker.daemon": {"hosts": "tcp://127.0.0.1:2375"}}),
    ("docker-on-the-network", {"docker.daemon": {"hosts": [":2375"]}}),
]


@pytest.mark.parametrize(("rule", "settings"), UNTRUSTED)
def test_third_party_code_is_rejected_without_an_override(rule, settings):
    [problem] = problems(**settings)
    assert f"guard rail {rule}:" in problem.what
    other = "docker-on-the-network" if rule == "trust-remote-code" else "trust-remote-code"
    assert problem_texts(**settings, override_rails={other: WHY})
    if rule == "pickled-weights":
        texts = problem_texts(override_rails={rule: WHY})
        assert any("cannot be overridden" in text for text in texts)
        return
    assert f"override_rails: {{{rule}: REASON}}" in problem.fix
    warnings = resolve(settings_of(**settings, override_rails={rule: WHY}), CATALOG).warnings
    assert any(f"{rule} is overridden ({WHY})" in text for text in warnings)


@pytest.mark.parametrize(
    "settings",
    [
        {"engine.options": {"trust-remote-code": False}},
        {"engine.options": {"no-trust-remote-code": True}},
        {"engine.options": {"reasoning-parser": "qwen3"}},
        {"engine.options": {"worker-cls": None}},
        {
            "engine.options": {
                "compilation-config": {
                    "pass_config": {"fuse_norm_quant": True},
                    "custom_ops": ["none", "+rms_norm"],
                }
            }
        },
        {
            "engine.environment": {
                "NCCL_IB_HCA": "=rocep1s0f0:1,roceP2p1s0f0:1",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
                "NCCL_SOCKET_IFNAME": "enp1s0f0np0.100",
                "OMP_NUM_THREADS": "4",
            }
        },
        {"engine.environment": {"VLLM_ALLOW_INSECURE_SERIALIZATION": "0"}},
        {"docker.daemon": {"hosts": ["unix:///var/run/docker.sock", "fd://"]}},
        {"docker.daemon": {"log-opts": {"max-size": "50m"}}},
    ],
)
def test_settings_without_third_party_code_are_accepted(settings):
    assert problem_texts(**settings) == []


@pytest.mark.parametrize(
    ("rule", "what", "fix"),
    [
        ("trust-remote-kode", "no such guard rail", "did you mean trust-remote-code"),
        ("memory-fraction-unsafe", "cannot be overridden", "allowed: "),
    ],
)
def test_rejects_overrides_of_unknown_or_mandatory_rules(rule, what, fix):
    [problem] = problems(override_rails={rule: WHY})
    assert what in problem.what
    assert fix in problem.fix


def test_override_requires_a_reason():
    with pytest.raises(SettingsError):
        settings_of(override_rails={"trust-remote-code": ""})


@pytest.mark.parametrize("tokens", [NATIVE_CONTEXT + 1, 36 * NATIVE_CONTEXT])
def test_rejects_context_beyond_native_length(tokens):
    [problem] = problems(**{"engine.max_context_tokens": tokens})
    assert problem.where == "engine.max_context_tokens"
    assert f"set engine.max_context_tokens to {NATIVE_CONTEXT} or less" in problem.fix
    assert problems(**{"engine.max_context_tokens": NATIVE_CONTEXT}) == []


def test_warns_about_but_accepts_context_extended_by_an_option():
    stretched = {"engine.options": {"hf-overrides": {"rope_parameters": {"factor": 2.0}}}}
    longer = {"engine.max_context_tokens": NATIVE_CONTEXT + 1}
    assert problems("small", **longer, **stretched) == []
    warnings = plan_of("small", **stretched).warnings
    assert sum("stretched-context" in text for text in warnings) == 1


def test_rejects_more_sequences_than_tokens_per_step():
    limits = replace(V2.limits, max_sequences=4, max_batched_tokens=3)
    [problem] = model_profile_problems(
        LARGE, replace(V2, limits=limits), settings_of(), CATALOG.engines
    )
    assert "max_batched_tokens (3)" in problem.what
    assert "set engine.max_sequences to 3 or less" in problem.fix


@pytest.mark.parametrize(
    ("image", "refused"),
    [
        ("vllm/vllm-openai:v0.20.0", True),
        ("vllm/vllm-openai:v0.33.1", True),
        ("lmsysorg/sglang:v0.5.0", True),
        ("vllm/vllm-openai:v0.33.0-aarch64", False),
        (f"registry:5000/vllm:0.30.0@sha256:{'a' * 64}", False),
        ("registry:5000/v0.9/vllm:nightly", False),
    ],
)
def test_rejects_engines_unsupported_by_plugin(image, refused):
    engines = supported_engines()
    settings = settings_of(profile="v2", **{"images.engine": image})
    refusals = plan_problems(settings, CATALOG, engines)
    assert [problem.where for problem in refusals] == ["images.engine"] * refused
    assert all(", ".join(engines) in problem.what for problem in refusals)
    without = settings_of(profile="base", **{"images.engine": image})
    assert not [p for p in plan_problems(without, CATALOG, engines) if "plugin" in p.what]


def test_rejects_an_unknown_image_role():
    [problem] = problems(**{"images.engin": "vllm/vllm-openai:v0.32.0"})
    assert (problem.where, problem.fix) == ("images.engin", "did you mean images.engine?")
    [problem] = problems(**{"images.webui": "open-webui:1"})
    assert "engine, gpu_check" in problem.fix
