"""The kernel of 16-bit experts: which plans choose it, and what the proof then demands."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from spark_deploy.config.catalog.anatomy import Anatomy
from spark_deploy.config.catalog.model import Model, PlainModel
from spark_deploy.plan.engine_arguments import (
    TRITON_EXPERTS_LINE,
    engine_options,
    lines_of,
    pins_drafter_experts,
    pins_target_experts,
)
from spark_deploy.plan.resolve import with_drafts
from spark_deploy.plan.types import HostPlan
from tests.unit.planning.plans import shipped, shipped_catalog

CATALOG = shipped_catalog()
LARGE = CATALOG.model("qwen3.5-122b")
PLANS = {(m, p): plan for m, p, plan in shipped() if isinstance(plan, HostPlan)}
# Whether the drafter of a shipped model has 16-bit experts that a GPU computes; models that owners
# add are not judged here.
PINNED = {"qwen3.5-122b": True, "lab-stub": True, "qwen3.5-35b": False, "lab-tiny": False}
TRITON = (
    "INFO [unquantized.py:298] Using TRITON Unquantized MoE backend out of potential backends: "
    "['FlashInfer TRTLLM', 'FlashInfer CUTLASS', 'TRITON', 'BATCHED_TRITON']."
)


def drafts_of(plan: HostPlan) -> dict[str, object]:
    argv = plan.serve.engine.argv
    if "--speculative-config" not in argv:
        return {}
    found: dict[str, object] = json.loads(argv[argv.index("--speculative-config") + 1])
    return found


@pytest.mark.parametrize("pair", [pair for pair in PLANS if pair[0] in PINNED], ids="-".join)
def test_every_shipped_drafter_with_16_bit_experts_is_pinned_and_proven_so(
    pair: tuple[str, str],
) -> None:
    plan, drafts = PLANS[pair], drafts_of(PLANS[pair])
    wanted = PINNED[pair[0]] and drafts.get("method") == "mtp"
    assert (drafts.get("moe_backend") == "triton") is wanted
    assert (TRITON_EXPERTS_LINE in plan.serve.check.log_required) is wanted


def test_a_model_of_several_hosts_is_pinned_as_well() -> None:
    model = CATALOG.model("qwen3.5-397b")
    assert pins_drafter_experts(model, CATALOG.profile("v2", "qwen3.5-397b"))


def test_only_the_pinned_kernel_passes() -> None:
    assert re.search(TRITON_EXPERTS_LINE, TRITON)
    assert re.search(TRITON_EXPERTS_LINE, "Using TRITON Unquantized MoE LoRA backend")
    for other in ("FlashInfer CUTLASS", "BATCHED_TRITON"):
        assert not re.search(TRITON_EXPERTS_LINE, TRITON.replace("TRITON U", f"{other} U", 1))


def plain(**said: object) -> Model:
    anatomy = Anatomy(repository="org/x", commit="0" * 40, **said)  # type: ignore[arg-type]
    return PlainModel(
        name="x", kind="plain", summary="x", choose_when="x", repository="org/x", anatomy=anatomy
    )


@pytest.mark.parametrize(
    ("model", "pinned"),
    [
        (plain(expert_width=768), True),
        (plain(expert_width=768, quantisation="fp8"), False),
        (plain(), False),
        (dataclasses.replace(plain(), anatomy=None), False),
    ],
    ids=["16-bit experts", "other experts", "dense", "not read yet"],
)
def test_of_a_plain_repository_only_16_bit_experts_are_pinned(model: Model, pinned: bool) -> None:
    profile = with_drafts(CATALOG.profile("v2", "qwen3.5-122b"), 2)
    assert pins_drafter_experts(model, profile) is pinned


@pytest.mark.parametrize(("width", "chosen"), [(768, "triton"), (None, None)])
def test_16_bit_experts_of_a_target_are_pinned_and_proven_so(
    width: int | None, chosen: str | None
) -> None:
    profile = CATALOG.profile("plain", "qwen3-4b")
    model = plain(expert_width=width, context_tokens=4096)
    memory = PLANS["qwen3-4b", "plain"].memory
    assert engine_options(model, profile, memory).get("moe-backend") == chosen
    required, _ = lines_of(model, profile, plugin=False)
    assert (TRITON_EXPERTS_LINE in required) is (chosen is not None)


def test_quantised_experts_of_a_target_keep_the_engines_choice() -> None:
    profile = CATALOG.profile("plain", "qwen3-4b")
    assert not pins_target_experts(plain(expert_width=768, quantisation="fp8"), profile)


@pytest.mark.parametrize(
    "options",
    [
        {"moe-backend": "auto"},
        {"kernel_config": '{"moe_backend": "flashinfer_cutlass"}'},
        {"quantization": "fp8"},
        {"quantization-config": {}},
        {"model-impl": "transformers"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_change_the_experts_or_choose_their_kernel_win(
    options: dict[str, object],
) -> None:
    profile = dataclasses.replace(CATALOG.profile("plain", "qwen3-4b"), options=options)
    model = plain(expert_width=768)
    assert not pins_target_experts(model, profile)
    assert TRITON_EXPERTS_LINE not in lines_of(model, profile, plugin=False)[0]


def test_portable_mode_takes_the_engines_own_kernel() -> None:
    profile = dataclasses.replace(CATALOG.profile("plain", "qwen3-4b"), engine_mode="portable")
    assert not pins_target_experts(plain(expert_width=768), profile)


def test_a_drafter_of_another_repository_and_an_engine_without_a_gpu_are_left_alone() -> None:
    profile = CATALOG.profile("v2", "qwen3.5-122b")
    assert profile.speculation is not None
    other = dataclasses.replace(profile.speculation, repository="org/drafter")
    for changed in (
        dataclasses.replace(profile, speculation=other),
        dataclasses.replace(profile, speculation=None),
        dataclasses.replace(profile, engine_mode="portable"),
    ):
        assert not pins_drafter_experts(LARGE, changed)
        assert TRITON_EXPERTS_LINE not in lines_of(LARGE, changed, plugin=True)[0]
