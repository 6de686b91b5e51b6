"""What the plan hands to the builder on the host is what the builder takes."""

import json

import pytest
from spark_contract import documents
from spark_contract.fetching import FetchPlan
from spark_contract.orders import BuildPlan, expand_all

from spark_deploy.plan.jobs import jobs_of
from tests.unit.planning.plans import CATALOG, plan_of

MODELS = ("large", "small")


def orders(model: str, profile: str) -> dict[str, dict]:
    return {
        work.job.kind: json.loads(file.content)
        for work in jobs_of(plan_of(model, profile), ())
        for file in work.inputs
        if file.path.endswith(("fetch.json", "plan.json"))
    }


@pytest.mark.parametrize("profile", CATALOG.profile_names)
@pytest.mark.parametrize("model", MODELS)
def test_fetch_and_build_orders_are_read_by_the_host_as_they_are_written(model, profile):
    found = orders(model, profile)
    kinds = {"fetch": FetchPlan, "checkpoint": BuildPlan}
    builds = CATALOG.profile(profile, model).builds_checkpoint
    assert set(found) == ({"fetch", "checkpoint"} if builds else {"fetch"})
    for kind, document in found.items():
        assert documents.plain(documents.read(kinds[kind], document)) == document


@pytest.mark.parametrize("model", MODELS)
def test_the_builder_is_told_what_the_donor_must_hold_of_every_swapped_module(model):
    plan = orders(model, "v2")["checkpoint"]
    shape = CATALOG.model(model).architecture
    wide, narrow = shape.hidden, shape.shared_expert_width
    told = {}
    for part in plan["donor_shapes"]:
        for name in expand_all([part["modules"]]):
            told[name] = (part["weight"], part["scale"])
    assert set(told) == expand_all(plan["swap"])
    for name, (weight, scale) in told.items():
        expected = [wide, narrow] if name.endswith("down_proj") else [narrow, wide]
        assert weight == expected
        assert scale == [expected[0] // 128, expected[1] // 128]
