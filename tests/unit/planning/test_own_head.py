"""The opt-in head: reachable from a profile, 16-bit in the tree, INT8 in the engine."""

import dataclasses
import json

from spark_vllm.head.choice import IMAGE_VARIABLE

from spark_deploy.plan.engine_arguments import HEAD_TIMES, engine_arguments, engine_environment
from spark_deploy.plan.memory import loaded_bytes, plan_memory
from tests.unit.planning.plans import CATALOG, LARGE, plan_of, plan_with, settings_of

BAKED = CATALOG.profile("v2", "large")
OWN = dataclasses.replace(BAKED, head="int8-triton")


def argument(profile, name):
    settings = settings_of()
    memory = plan_memory(LARGE, profile, settings)
    argv = engine_arguments(LARGE, profile, memory, ("m",))
    return argv[argv.index(name) + 1] if name in argv else None


def test_the_tree_keeps_the_head_of_the_base():
    own = dataclasses.replace(CATALOG, profiles={**CATALOG.profiles, ("v2", "large"): OWN})
    assert plan_with(settings_of(), own).checkpoint.order.head == "keep"
    assert plan_of().checkpoint.order.head == "int8-g128"


def test_the_engine_is_told_and_keeps_its_measurements_where_they_last():
    said = json.loads(argument(OWN, "--additional-config"))
    assert said == {"spark": {"lm_head": "int8-triton", "lm_head_times": HEAD_TIMES}}
    assert argument(BAKED, "--additional-config") is None


def test_further_options_of_a_profile_are_joined_with_it():
    options = {
        "additional-config": {"gdn_prefill_backend": "triton", "spark": {"lm_head_kernel": "own"}}
    }
    joined = dataclasses.replace(OWN, options=options)
    said = json.loads(argument(joined, "--additional-config"))
    assert said["gdn_prefill_backend"] == "triton"
    assert said["spark"]["lm_head"] == "int8-triton"
    assert said["spark"]["lm_head_kernel"] == "own"


def test_the_engine_is_told_in_which_image_it_measures():
    def environment(profile):
        return engine_environment(profile, plugin=True, start_timeout_s=60, image="spark-vllm:0a1b")

    assert environment(OWN)[IMAGE_VARIABLE] == "spark-vllm:0a1b"
    assert IMAGE_VARIABLE not in environment(BAKED)


def test_it_needs_the_memory_of_the_baked_one():
    assert loaded_bytes(LARGE, OWN) == loaded_bytes(LARGE, BAKED)
