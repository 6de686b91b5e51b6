"""What the plan hands to the builder on the host is what the builder takes."""

import json

import jsonschema
import pytest
from spark_checkpoint import RECIPE_VERSION
from spark_checkpoint.format.patterns import expand_all as host_expand_all
from spark_contract.patterns import expand_all

from spark_deploy.checkout import CHECKOUT
from spark_deploy.payload.content import recipe_version
from spark_deploy.planning.work.jobs import jobs_of
from tests.unit.planning.plans import CATALOG, plan_of

MODELS = ("large", "small")


def documents(model: str, profile: str) -> dict[str, dict]:
    return {
        job.kind: json.loads(file.content)
        for job in jobs_of(plan_of(model, profile), ())
        for file in job.inputs
        if file.path.endswith(("fetch.json", "plan.json"))
    }


@pytest.mark.parametrize("profile", CATALOG.profile_names)
@pytest.mark.parametrize("model", MODELS)
def test_fetch_and_build_orders_follow_the_schemas_of_the_host(model, profile):
    found = documents(model, profile)
    names = {"fetch": "fetch", "checkpoint": "checkpoint-plan"}
    builds = CATALOG.profile(profile, model).builds_checkpoint
    assert set(found) == ({"fetch", "checkpoint"} if builds else {"fetch"})
    for kind, document in found.items():
        schema = json.loads((CHECKOUT / f"schema/{names[kind]}.schema.json").read_text("utf-8"))
        jsonschema.Draft202012Validator(schema).validate(document)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("part", ["swap", "base", "mtp", "donor_unmatched"])
def test_patterns_mean_the_same_here_and_on_the_host(model, part):
    patterns = getattr(CATALOG.model(model).tensors, part)
    assert host_expand_all(patterns, part) == expand_all(patterns)


@pytest.mark.parametrize("model", MODELS)
def test_the_builder_is_told_what_the_donor_must_hold_of_every_swapped_module(model):
    plan = documents(model, "v2")["checkpoint"]
    shape = CATALOG.model(model).architecture
    wide, narrow = shape.hidden, shape.shared_expert_width
    told = {}
    for part in plan["donor_shapes"]:
        for name in host_expand_all([part["modules"]], "donor_shapes"):
            told[name] = (part["weight"], part["scale"])
    assert set(told) == host_expand_all(plan["swap"], "swap")
    for name, (weight, scale) in told.items():
        expected = [wide, narrow] if name.endswith("down_proj") else [narrow, wide]
        assert weight == expected
        assert scale == [expected[0] // 128, expected[1] // 128]


def test_the_recipe_version_is_the_builders_own():
    assert recipe_version() == RECIPE_VERSION
