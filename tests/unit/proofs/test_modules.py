"""The proofs run far away and seldom: what they take from the product is looked at here."""

import importlib
import json
import pkgutil

import pytest

import proofs
from proofs.serve import long
from spark_deploy.config.checkout import CHECKOUT

ELSEWHERE = ("torch", "transformers", "vllm")
"""Packages of a CUDA machine."""
MODULES = sorted(module.name for module in pkgutil.walk_packages(proofs.__path__, "proofs."))


@pytest.mark.parametrize("name", MODULES)
def test_every_module_finds_what_it_imports(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ELSEWHERE:
            raise
        pytest.skip(f"needs {error.name}")


def test_long_prompts_are_judged_by_the_watch_of_today() -> None:
    kept = json.loads((CHECKOUT / "proofs/results/gpu/serve-v2-long.json").read_text())
    rows = long.judge(kept, "v2")
    for row, recorded in zip(rows, kept["rows"], strict=True):
        assert (row["passed"], row["numbers"]) == (recorded["passed"], recorded["numbers"])
    alone, _ = rows  # four prompts finish at different times, each with a token
    assert alone["numbers"]["stalled_by_tokens_alone"]
