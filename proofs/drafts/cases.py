"""Engine runs with a draft model for the lab's trained model, and their judge."""

from typing import Any

from proofs.drafts.trees import DRAFTS, SPOILT_TENSOR, TOKENS
from proofs.engine.cases import case, graphs
from proofs.judges.answers import Row, attempt, judge_same_answers, row

TREE = "tiny-overlay-head8"
PLAIN = "tiny-head8"
QUIET = {"capture": False}
RANDOM, SPOILT = "-random-eager", "-nan-eager"
Cases = list[dict[str, Any]]


def gpu_cases() -> Cases:
    cases = []
    for kind in DRAFTS:
        cases += [
            _case(f"{kind}-eager", kind, f"tiny-{kind}"),
            _case(f"{kind}-full", kind, f"tiny-{kind}", **graphs("FULL_AND_PIECEWISE")),
        ]
    return [*cases, _random("dflash")]


def cpu_cases(portable: dict[str, Any]) -> Cases:
    more = {**portable, "draft_load_config": {"load_format": "safetensors"}}
    cases = [case(PLAIN, TREE, options=portable, **QUIET)]
    for kind in DRAFTS:
        cases += [_case(f"{kind}-eager", kind, f"tiny-{kind}", **more), _random(kind, **more)]
    return [*cases, _case(f"dflash{SPOILT}", "dflash", "tiny-dflash-nan", **more)]


def _random(kind: str, **more: Any) -> dict[str, Any]:
    return _case(f"{kind}{RANDOM}", kind, f"tiny-{kind}-random", **more)


def _case(name: str, kind: str, draft: str, **options: Any) -> dict[str, Any]:
    speculation = {"method": kind, "model": draft, "num_speculative_tokens": TOKENS}
    if "draft_load_config" in options:
        speculation["draft_load_config"] = options.pop("draft_load_config")
    return case(name, TREE, options={"speculative_config": speculation, **options}, **QUIET)


LEAST = 0.5
"""Least acceptance of a trained draft; the last drafts of an answer exceed the end."""
MAX_BY_CHANCE = 0.05


def judge_drafts(results: dict[str, Row], cases: Cases) -> list[Row]:
    names = [case["name"] for case in cases if case["name"] != PLAIN]
    return [attempt(name, judge_run, results, name) for name in names]


def judge_run(results: dict[str, Row], name: str) -> Row:
    if name.endswith(SPOILT):
        return _refused(results[name], name)
    claim = f"more than {LEAST} of the drafts are accepted"
    if name.endswith(RANDOM):
        claim = f"at most {MAX_BY_CHANCE} of the drafts are accepted"

    def accepts(share: float | None) -> bool:
        if share is None:
            return False
        return share < MAX_BY_CHANCE if name.endswith(RANDOM) else share > LEAST

    claim = f"greedy answers equal {PLAIN} outside ties, {claim}"
    return judge_same_answers(results, name, PLAIN, claim, accepts=accepts)


def _refused(result: Row, name: str) -> Row:
    error = str(result.get("error", [""])[0])
    return row(
        f"{name}: a draft with a NaN is refused by the tensor's name",
        result["state"] == "refused" and "NaN" in error and f"model.{SPOILT_TENSOR};" in error,
        [name],
        state=result["state"],
        error=error[:300],
    )
