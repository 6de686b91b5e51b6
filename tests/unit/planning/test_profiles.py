"""Profiles claim what result files show, and nothing that cannot be planned."""

import json

import pytest

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.settings.types import Settings
from tests.unit.planning.plans import shipped_catalog

RESULTS = CHECKOUT / "proofs/results/gpu"
CATALOG, DEFAULT = shipped_catalog(), Settings()
PROFILES = {name: CATALOG.profile(name, DEFAULT.model) for name in CATALOG.profile_names}
PROVEN = [(name, row) for name, profile in PROFILES.items() for row in profile.proven]


@pytest.mark.parametrize(("name", "row"), PROVEN)
def test_a_proven_row_is_a_passed_row_of_a_result_file(name, row):
    found = json.loads((RESULTS / row.result).read_text("utf-8"))
    [claim] = [item for item in found["rows"] if item["claim"] == row.claim]
    assert claim["passed"] is True


def test_the_page_of_results_lists_every_profile_with_its_results():
    page = (CHECKOUT / "proofs/profiles.md").read_text("utf-8")
    for name, profile in PROFILES.items():
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert bool(section) is bool(profile.proven)
        assert all(f"(results/gpu/{row.result})" in section for row in profile.proven)


def test_the_profile_of_the_defaults_is_proven():
    assert PROFILES[DEFAULT.profile].proven


@pytest.mark.parametrize("name", [name for name in PROFILES if not PROFILES[name].plugin])
def test_a_profile_without_the_plugin_serves_a_tree_that_the_engine_knows(name):
    assert not PROFILES[name].tree_needs_plugin
    assert PROFILES["v2"].tree_needs_plugin


def test_the_option_of_online_fp8_is_the_one_that_ran():
    runs = json.loads((RESULTS / "engine-speculation.json").read_text("utf-8"))["runs"]
    ran = runs["tiny-online-fp8"]["options"]["quantization_config"]
    assert PROFILES["online-fp8"].options["quantization-config"] == ran


@pytest.mark.parametrize("name", [name for name in PROFILES if PROFILES[name].speculation])
def test_a_profile_with_drafts_demands_that_they_are_accepted(name):
    assert PROFILES[name].check.acceptance_floor
