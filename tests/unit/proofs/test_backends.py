"""The recorded table of kernel choices covers the profiles and has the pins of the plans."""

import json
from dataclasses import replace

import pytest

from proofs.engine.backends import read_pins, remove_pins
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.resolve import Request
from spark_deploy.plan.types import HostPlan
from tests.unit.planning.plans import (
    PAYLOAD,
    made_up_lock,
    shipped_catalog,
    shipped_pairs,
    shipped_plan,
)

TABLE = json.loads((CHECKOUT / "proofs/results/cpu/backends.json").read_text("utf-8"))
# An owner's profile has no proofs and no row in the table; Qwen4Exp models need CUDA.
HYBRIDS = sorted(
    name
    for model, name in shipped_pairs()
    if model == "qwen3.5-122b" and shipped_catalog().profile(name, model).proven
)
SERVED = {
    **{f"{name} of qwen3.5-122b": ("qwen3.5-122b", name) for name in HYBRIDS},
    "v2 of qwen3.5-35b": ("qwen3.5-35b", "v2"),
    "plain of a BF16 repository": ("qwen3-30b-a3b", "plain"),
    "plain of an FP8 repository": ("qwen3-4b", "plain"),
}


def test_backend_table_covers_every_shipped_profile():
    assert set(TABLE["cases"]) == set(SERVED)


@pytest.mark.parametrize("case", SERVED)
def test_planned_kernel_options_match_the_backend_table(case):
    plan = bf16_plan() if "BF16" in case else shipped_plan(*SERVED[case])
    assert isinstance(plan, HostPlan)
    engine = plan.release.engine
    assert read_pins(list(engine.argv), engine.env) == TABLE["cases"][case]["pins"]
    assert not read_pins(remove_pins(list(engine.argv)), {})


def bf16_plan():
    model, profile = SERVED["plain of a BF16 repository"]
    settings = replace(Settings(), model=model, profile=profile)
    lock = made_up_lock(settings, shipped_catalog())
    repo_metadata = {
        name: replace(metadata, expert_width=768) for name, metadata in lock.repo_metadata.items()
    }
    lock = replace(lock, repo_metadata=repo_metadata)
    return plan_host(Request("a", settings, shipped_catalog(), lock, PAYLOAD))


def test_every_backend_difference_is_planned_or_explained():
    assert not [
        difference["choice"]
        for difference in TABLE["differences"]
        if difference["planned"] and not difference["note"]
    ]


@pytest.mark.parametrize(
    ("layers", "unpinned"),
    [("drafter experts", "v2 of qwen3.5-122b"), ("target experts", "plain of a BF16 repository")],
)
def test_planned_kernel_options_exclude_flashinfer_from_16_bit_experts(layers, unpinned):
    kernels = {
        form: {
            case: choices["12.1"][form].get(layers, "") for case, choices in TABLE["cases"].items()
        }
        for form in ("pinned", "free")
    }
    assert "FlashInfer" in kernels["free"][unpinned]
    assert not [case for case, choice in kernels["pinned"].items() if "FlashInfer" in choice]
