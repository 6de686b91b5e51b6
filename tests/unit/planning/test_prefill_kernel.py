"""A proof holds for the prefill kernel it was computed with, and the engine has to name it."""

from __future__ import annotations

import dataclasses
import re

import pytest

from spark_deploy.plan.engine_arguments import prefill_line
from spark_deploy.plan.resolve import effective_profile
from tests.unit.planning.plans import settings_of, shipped_catalog

CATALOG, MODEL = shipped_catalog(), "qwen3.5-122b"
TRITON = (
    "INFO [qwen_gdn.py:178] Using Triton/FLA GDN prefill kernel (requested=triton, head_k_dim=128)."
)
FLASHINFER = (
    "INFO [qwen_gdn.py:178] Using FlashInfer GDN prefill kernel (requested=auto, head_k_dim=128)."
)


PINNED = {
    name: found
    for name in CATALOG.profile_names
    if (found := prefill_line(CATALOG.model(MODEL), CATALOG.profile(name, MODEL)))
}


@pytest.mark.parametrize("name", PINNED)
def test_a_profile_is_proven_only_with_the_kernel_that_its_proofs_ran(name: str) -> None:
    [pattern] = PINNED[name]
    assert re.search(pattern, TRITON)
    assert not re.search(pattern, FLASHINFER)
    # What the engine falls back to by itself is not what was asked for.
    assert not re.search(pattern, TRITON.replace("requested=triton", "requested=auto"))


def test_the_default_profile_is_pinned() -> None:
    assert settings_of().profile in PINNED


def test_another_choice_of_the_owner_is_held_to_its_own_line() -> None:
    model, profile = CATALOG.model(MODEL), CATALOG.profile("v2", MODEL)

    def lines(backend: str | None) -> list[str]:
        settings = settings_of(**{"engine.options": {"gdn_prefill_backend": backend}})
        return prefill_line(model, effective_profile(profile, settings))

    assert re.search(lines("flashinfer")[0], FLASHINFER.replace("auto", "flashinfer"))
    assert lines(None) == []


def test_a_model_without_linear_layers_and_an_engine_without_a_gpu_name_no_kernel() -> None:
    model, profile = CATALOG.model(MODEL), CATALOG.profile("v2", MODEL)
    dense = dataclasses.replace(model.architecture, full_attention_every=1)
    assert prefill_line(dataclasses.replace(model, architecture=dense), profile) == []
    assert prefill_line(CATALOG.model("lab-tiny"), CATALOG.profile("v2", "lab-tiny")) == []
