"""The documented table of planted faults is what the tests plant."""

from __future__ import annotations

import re

from spark_deploy.config.checkout import CHECKOUT
from tests.faults.plants import BESIDE_THE_ENGINE, DEPLOYED, PLANTS
from tests.faults.stub_faults import stub_faults

PAGE = (CHECKOUT / "proofs/faults.md").read_text("utf-8")
SECTION = PAGE.partition("### What is planted")[2].partition("\n## ")[0]

# A change of profile must survive each of these, whatever else is planted.
DEMANDED = {
    "bad flag", "out of memory at load", "garbage answers", "low acceptance", "wedge after start",
    "wrong served name", "plugin missing",
}  # fmt: skip


def test_every_plant_stands_in_the_table_with_the_phase_that_catches_it() -> None:
    rows = re.findall(r"^\| ([a-z ]+) \| `([a-z]+)` \| (yes)? ?\|$", SECTION, re.MULTILINE)
    documented = {name: (phase, bool(deployed)) for name, phase, deployed in rows}
    assert documented == {
        name: (plant.phase, plant.choices is not None) for name, plant in PLANTS.items()
    }
    assert len(documented) == len(rows)


def test_every_misbehaviour_of_the_stub_engine_is_named() -> None:
    named = SECTION.partition("test_every_misbehaviour.py")[2]
    # The watch ends a leak, no check does.
    assert sorted(re.findall(r"`([a-z0-9-]+)`", named)) == stub_faults()


def test_what_must_not_break_a_server_is_tried_by_whole_deploys() -> None:
    assert set(DEPLOYED) >= DEMANDED


def test_every_plant_is_tried_on_a_host_that_a_deploy_made() -> None:
    """So that a deploy afterwards can be held to change nothing, as the page says."""
    by_the_stub = {
        name
        for name, plant in PLANTS.items()
        if plant.release.get("engine__env", {}).get("STUB_FAULT") in stub_faults()
    }
    assert set(DEPLOYED) | by_the_stub | set(BESIDE_THE_ENGINE) == set(PLANTS)
    assert not by_the_stub & set(BESIDE_THE_ENGINE)
