"""The committed table of kernel choices covers the profiles; its pins are those of the plans."""

from __future__ import annotations

import json

import pytest

from proofs.engine.backends import pins_of
from spark_deploy.checkout import CHECKOUT
from spark_deploy.planning.types import HostPlan
from tests.unit.planning.plans import shipped, shipped_catalog

TABLE = json.loads((CHECKOUT / "proofs/results/cpu/backends.json").read_text("utf-8"))
PLANS = {(model, profile): plan for model, profile, plan in shipped()}
HYBRIDS = sorted(set(shipped_catalog().profile_names) - {"plain"})
SERVED = {
    **{f"{name} of qwen3.5-122b": ("qwen3.5-122b", name) for name in HYBRIDS},
    "v2 of qwen3.5-35b": ("qwen3.5-35b", "v2"),
    "plain of a BF16 repository": ("qwen3-4b", "plain"),
    "plain of an FP8 repository": ("qwen3-4b", "plain"),
}


def test_the_table_covers_every_shipped_profile() -> None:
    assert set(TABLE["cases"]) == set(SERVED)


@pytest.mark.parametrize("case", SERVED)
def test_a_profile_has_the_pins_that_the_table_was_made_with(case: str) -> None:
    plan = PLANS[SERVED[case]]
    assert isinstance(plan, HostPlan)
    engine = plan.serve.engine
    assert pins_of(list(engine.argv), engine.env) == TABLE["cases"][case]["pins"]


def test_every_difference_between_the_devices_is_pinned_or_explained() -> None:
    assert not [one["choice"] for one in TABLE["differences"] if one["planned"] and not one["note"]]


def test_the_pins_keep_flashinfer_out_of_every_drafter() -> None:
    chosen = {
        form: {
            case: found["12.1"][form].get("drafter experts", "")
            for case, found in TABLE["cases"].items()
        }
        for form in ("pinned", "free")
    }
    assert "FlashInfer" in chosen["free"]["v2 of qwen3.5-122b"]
    assert not [case for case, choice in chosen["pinned"].items() if "FlashInfer" in choice]
