"""Engine runs with a draft beside the lab's trained model, as data.

The trained draft has to be taken, the one that nobody trained must not be: both answer alike.
"""

from __future__ import annotations

from typing import Any

from proofs.drafts.shape import DRAFTS, TOKENS
from proofs.engine.cases import case, graphs

TREE = "tiny-overlay-head8"
PLAIN = "tiny-head8"
"""The case without a draft that answers are held against."""
QUIET = {"capture": False}
RANDOM, SPOILT = "-random-eager", "-nan-eager"
Cases = list[dict[str, Any]]


def gpu_cases() -> Cases:
    found = []
    for kind in DRAFTS:
        found += [
            _case(f"{kind}-eager", kind, f"tiny-{kind}"),
            _case(f"{kind}-full", kind, f"tiny-{kind}", **graphs("FULL_AND_PIECEWISE")),
        ]
    return [*found, _random("dflash")]


def cpu_cases(portable: dict[str, Any]) -> Cases:
    """The same eager, each random, and one with a number that is NaN."""
    more = {**portable, "draft_load_config": {"load_format": "safetensors"}}
    found = [case(PLAIN, TREE, options=portable, **QUIET)]
    for kind in DRAFTS:
        found += [_case(f"{kind}-eager", kind, f"tiny-{kind}", **more), _random(kind, **more)]
    return [*found, _case(f"dflash{SPOILT}", "dflash", "tiny-dflash-nan", **more)]


def _random(kind: str, **more: Any) -> dict[str, Any]:
    return _case(f"{kind}{RANDOM}", kind, f"tiny-{kind}-random", **more)


def _case(name: str, kind: str, draft: str, **options: Any) -> dict[str, Any]:
    told = {"method": kind, "model": draft, "num_speculative_tokens": TOKENS}
    if "draft_load_config" in options:
        told["draft_load_config"] = options.pop("draft_load_config")
    return case(name, TREE, options={"speculative_config": told, **options}, **QUIET)
