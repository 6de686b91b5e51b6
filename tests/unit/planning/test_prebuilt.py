"""A prebuilt hybrid as the source: locked and fetched instead of the base, proven by the donor."""

import pytest

from spark_deploy.config.errors import PlanError
from spark_deploy.lock.resolve import wanted_by
from tests.unit.planning.plans import CATALOG, plan_of, problems, settings_of

HYBRID, DONOR = "other/large-hybrid", "org/large-fp8"
PREBUILT = {"checkpoint.prebuilt": True, "checkpoint.layout": "full"}


def test_the_hybrid_stands_in_for_the_base_and_the_donor_stays():
    plan = plan_of(**PREBUILT)
    assert {repo for repo, _ in wanted_by(settings_of(**PREBUILT), CATALOG).sources} == {
        HYBRID,
        DONOR,
    }
    assert [source.locked.repo for source in plan.sources] == [HYBRID]
    assert plan.checkpoint.donor.repo == DONOR
    assert plan.checkpoint.order.shared_experts == "fp8-base"
    built = plan_of(**{"checkpoint.layout": "full"})
    same = ("swap", "base_tensors", "mtp_tensors", "donor_unmatched", "head")
    assert [getattr(plan.checkpoint.order, key) for key in same] == [
        getattr(built.checkpoint.order, key) for key in same
    ]
    assert plan.memory == built.memory
    assert plan.checkpoint.digest != built.checkpoint.digest
    # Its shared experts are small already; only the head shrinks.
    assert plan.checkpoint.output_bytes > built.checkpoint.output_bytes


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"checkpoint.layout": "overlay"}, "set checkpoint.layout: full"),
        ({"model": "small"}, "no prebuilt hybrid"),
        ({"profile": "v2-native"}, "int8-g128"),
        ({"profile": "base"}, "needs keep"),
    ],
)
def test_where_a_hybrid_cannot_serve_the_plan_says_so(choices, said):
    choices = {**PREBUILT, **choices}
    with pytest.raises(PlanError) as refused:
        plan_of(**choices)
    assert said in str(refused.value)
    assert said in str(problems(**choices)[0])
