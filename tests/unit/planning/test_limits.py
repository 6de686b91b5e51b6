"""What neither model nor engine nor one host can do is refused with the numbers."""

import dataclasses

import pytest

from spark_deploy.hosts.payload import supported_engines
from spark_deploy.plan.guard_rails import pair_problems
from spark_deploy.plan.resolve import problems_of
from tests.unit.planning.plans import CATALOG, plan_of, problems, settings_of, whats

NATIVE = CATALOG.model("large").architecture.max_context_tokens


def test_a_context_beyond_the_models_own_is_refused():
    [found] = problems(**{"engine.max_context_tokens": NATIVE + 1})
    assert found.where == "engine.max_context_tokens"
    assert f"{NATIVE + 1:,} tokens exceed" in found.what
    assert f"set engine.max_context_tokens to {NATIVE} or less" in found.fix
    assert whats(**{"engine.max_context_tokens": NATIVE}) == []


def test_no_advice_goes_beyond_the_models_own_context():
    """A context so long that it does not fit either was advised down to one that is too long."""
    [found] = problems(**{"engine.max_context_tokens": 36 * NATIVE})
    assert f"to {NATIVE} or less" in found.fix


def test_a_context_that_an_option_stretches_is_left_to_the_engine():
    stretched = {"engine.options": {"hf-overrides": {"rope_parameters": {"factor": 2.0}}}}
    assert whats("small", **{"engine.max_context_tokens": NATIVE + 1}, **stretched) == []
    told = [one for one in plan_of("small", **stretched).warnings if "stretched-context" in one]
    assert len(told) == 1


def test_more_requests_than_tokens_of_a_step_are_refused():
    profile = CATALOG.profile("v2", "large")
    limits = dataclasses.replace(profile.limits, max_sequences=4, max_batched_tokens=3)
    chosen = dataclasses.replace(profile, limits=limits)
    [found] = pair_problems(CATALOG.model("large"), chosen, settings_of(), CATALOG.engines)
    assert "max_batched_tokens (3)" in found.what
    assert "set engine.max_sequences to 3 or less" in found.fix


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"tensor-parallel-size": 2}, "one-gpu-in-a-host"),
        ({"tensor_parallel_size": "2"}, "one-gpu-in-a-host"),
        ({"data-parallel-size": 2}, "one-gpu-in-a-host"),
        ({"nnodes": 2}, "one-gpu-in-a-host"),
        ({"distributed-executor-backend": "ray"}, "ray"),
        ({"distributed_executor_backend": "Ray"}, "ray"),
    ],
)
def test_an_engine_of_several_gpus_is_refused_on_one_host(options, rule):
    [found] = whats(**{"engine.options": options})
    assert f"guard rail {rule}:" in found


@pytest.mark.parametrize("options", [{"tensor-parallel-size": 1}, {"data-parallel-size": "1"},
                                     {"distributed-executor-backend": "mp"}])  # fmt: skip
def test_an_engine_of_one_gpu_may_say_so(options):
    assert whats(**{"engine.options": options}) == []


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
def test_an_engine_that_the_plugin_does_not_know_is_refused_by_its_tag(image, refused):
    engines = supported_engines()
    settings = settings_of(profile="v2", **{"images.engine": image})
    found = problems_of(settings, CATALOG, engines)
    assert [one.where for one in found] == ["images.engine"] * refused
    assert all(", ".join(engines) in one.what for one in found)
    without = settings_of(profile="base", **{"images.engine": image})
    assert not [one for one in problems_of(without, CATALOG, engines) if "plugin" in one.what]


def test_an_image_that_nothing_asks_for_is_refused_with_the_role_that_was_meant():
    [found] = problems_of(settings_of(**{"images.engin": "vllm/vllm-openai:v0.32.0"}), CATALOG)
    assert (found.where, found.fix) == ("images.engin", "did you mean images.engine?")
    [other] = problems_of(settings_of(**{"images.webui": "open-webui:1"}), CATALOG)
    assert "engine, gpu_check" in other.fix


def test_a_guard_rail_about_no_fact_is_told_and_not_passed_over():
    [rail, *_] = CATALOG.rails
    misspelt = dataclasses.replace(rail, applies={"kv_cach": {"is": "auto"}})
    catalog = dataclasses.replace(CATALOG, rails=(misspelt,))
    [found] = problems_of(settings_of(), catalog)
    assert found.where == f"catalog/guard_rails.yml: {rail.rule}: kv_cach"
    assert found.fix == "did you mean kv_cache?"
