"""A prebuilt hybrid as the source: locked and fetched instead of the base, proven by the donor."""

import dataclasses
from pathlib import Path

import pytest

from spark_deploy.checkout import CHECKOUT
from spark_deploy.errors import PlanError
from spark_deploy.lockfile.file import read_lock, with_entries
from spark_deploy.lockfile.resolve import wanted_by
from spark_deploy.planning.check import check_pair
from spark_deploy.planning.host import plan_host
from spark_deploy.planning.types import PayloadIdentity
from spark_deploy.settings.load import load_hosts

BASE = "Intel/Qwen3.5-122B-A10B-int4-AutoRound"
HYBRID = "bleysg/Qwen3.5-122B-A10B-int4-fp8-hybrid"
DONOR = "Qwen/Qwen3.5-122B-A10B-FP8"
PREBUILT = {"checkpoint.prebuilt": True, "checkpoint.layout": "full"}


def settings_of(tmp_path: Path, model="qwen3.5-122b", profile="v2", **more):
    overrides = {"model": model, "profile": profile, **more}
    return load_hosts({"spark": ["a"]}, root=tmp_path, overrides=overrides)["a"].settings


def plan_of(settings):
    lock = read_lock(CHECKOUT / "tests/fixtures/lock.yml")
    base = lock.source(BASE, "main")
    lock = with_entries(lock, [dataclasses.replace(base, repo=HYBRID, commit="9" * 40)], [])
    payload = PayloadIdentity("1" * 64, "2" * 64, 1, "requirements.txt")
    return plan_host(settings, lock, payload, host="a")


def test_the_hybrid_stands_in_for_the_base_and_the_donor_stays(tmp_path):
    settings = settings_of(tmp_path, **PREBUILT)
    plan = plan_of(settings)
    assert {repo for repo, _ in wanted_by(settings).sources} == {HYBRID, DONOR}
    assert [(source.role, source.repo) for source in plan.sources] == [("ready", HYBRID)]
    assert plan.checkpoint.donor_repo == DONOR
    assert plan.checkpoint.builder["shared_experts"] == "fp8-base"
    built = plan_of(settings_of(tmp_path, **{"checkpoint.layout": "full"}))
    same = ("swap", "base_tensors", "mtp_tensors", "donor_unmatched", "head")
    assert [plan.checkpoint.builder[key] for key in same] == [
        built.checkpoint.builder[key] for key in same
    ]
    assert plan.memory == built.memory
    assert plan.checkpoint.digest != built.checkpoint.digest
    # Its shared experts are small already; only the head shrinks.
    assert plan.checkpoint.output_bytes > built.checkpoint.output_bytes


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"checkpoint.layout": "overlay"}, "set checkpoint.layout: full"),
        ({"model": "qwen3.5-35b"}, "this model names no prebuilt hybrid"),
        ({"profile": "v2-native"}, "this profile wants int8-g128"),
        ({"profile": "base"}, "this profile wants keep"),
    ],
)
def test_where_a_hybrid_cannot_serve_the_plan_says_so(choices, said, tmp_path):
    settings = settings_of(tmp_path, **{**PREBUILT, **choices})
    with pytest.raises(PlanError) as refused:
        plan_of(settings)
    assert said in str(refused.value)
    assert said in str(check_pair(settings)[0])
