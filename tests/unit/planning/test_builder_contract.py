"""What the plan hands to the builder on the host is what the builder takes."""

import json

import jsonschema
import pytest
from spark_checkpoint import RECIPE_VERSION
from spark_checkpoint.format.patterns import expand_all as host_expand_all
from spark_contract.patterns import expand_all

from spark_deploy.catalog.load import load_model, load_profile
from spark_deploy.checkout import CHECKOUT, catalog_names
from spark_deploy.lockfile.file import read_lock
from spark_deploy.payload.content import recipe_version
from spark_deploy.planning.check import check_pair
from spark_deploy.planning.host import plan_host
from spark_deploy.planning.types import PayloadIdentity
from spark_deploy.planning.work.jobs import jobs_of
from spark_deploy.settings.load import load_hosts

MODELS = [name for name in catalog_names("models") if name != "qwen3.5-397b"]


def settings_of(model: str, profile: str, tmp_path):
    images = {"stub_engine": "registry.lab:5000/lab/stub-engine:1"}
    overrides = {"model": model, "profile": profile, "images": images}
    return load_hosts({"spark": ["a"]}, root=tmp_path, overrides=overrides)["a"].settings


def documents(settings) -> dict[str, dict]:
    lock = read_lock(CHECKOUT / "tests/fixtures/lock.yml")
    payload = PayloadIdentity("1" * 64, "2" * 64, RECIPE_VERSION, "requirements.txt")
    jobs = jobs_of(plan_host(settings, lock, payload), ())
    return {
        job.kind: json.loads(file.content)
        for job in jobs
        for file in job.inputs
        if file.path.endswith(("fetch.json", "plan.json"))
    }


@pytest.mark.parametrize("profile", catalog_names("profiles"))
@pytest.mark.parametrize("model", MODELS)
def test_fetch_and_build_orders_follow_the_schemas_of_the_host(model, profile, tmp_path):
    settings = settings_of(model, profile, tmp_path)
    if check_pair(settings):
        return  # refused: there are no orders
    found = documents(settings)
    names = {"fetch": "fetch", "checkpoint": "checkpoint-plan"}
    builds = load_profile(profile, model).builds_checkpoint
    assert set(found) == ({"fetch", "checkpoint"} if builds else {"fetch"})
    for kind, document in found.items():
        schema = json.loads((CHECKOUT / f"schema/{names[kind]}.schema.json").read_text("utf-8"))
        jsonschema.Draft202012Validator(schema).validate(document)


@pytest.mark.parametrize("model", ["qwen3.5-35b", "lab-tiny"])
@pytest.mark.parametrize("part", ["swap", "base", "mtp", "donor_unmatched"])
def test_patterns_mean_the_same_here_and_on_the_host(model, part):
    patterns = getattr(load_model(model).tensors, part)
    assert host_expand_all(patterns, part) == expand_all(patterns)


@pytest.mark.parametrize("model", MODELS)
def test_the_builder_is_told_what_the_donor_must_hold_of_every_swapped_module(model, tmp_path):
    plan = documents(settings_of(model, "v2", tmp_path))["checkpoint"]
    shape = load_model(model).architecture
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
