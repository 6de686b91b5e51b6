"""Sampled answers of the recall model: their distribution and acceptance with drafts.

A drafted answer must be distributed as one without drafts. Counts of the first tokens of many
answers are compared by a chi-square test of homogeneity, whose level is fixed beforehand.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from proofs.judges.answers import row
from proofs.recall import language

Row = dict[str, Any]
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0.6, top_k 20, top_p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "temperature 1.0": {"temperature": 1.0},
}
GREEDY = "temperature 0"
PROMPTS, PROMPT_TOKENS, TOKENS = 4, 96, 5
"""Prompts end before a new slot: its kind, its words and registers have known alternatives."""
FREE_PROMPTS, FREE_PROMPT_TOKENS, FREE_TOKENS = 24, 512, 64
RARE = 20
"""Answers of both engines below which outcomes share a bin."""
LEVEL = 0.01


def make_prompts(count: int, tokens: int) -> list[list[int]]:
    source = np.random.default_rng([count, tokens])
    return [language.context(source, tokens, near=False).tokens.tolist() for _ in range(count)]


def sample(llm: Any, count: int, cooler: float) -> Row:
    """Return ``count`` answers to each prompt, and the acceptance of drafts by setting.

    ``cooler`` multiplies temperatures, as a damage.
    """
    from vllm import SamplingParams

    from proofs.engine import case as engine_case

    def ask(prompts: list[list[int]], **options: Any) -> Any:
        temperature = options.pop("temperature") * cooler
        sampling = SamplingParams(
            temperature=temperature, ignore_eos=True, detokenize=False, **options
        )
        requests = [engine_case.to_request(prompt) for prompt in prompts]
        return llm.generate(requests, sampling, use_tqdm=False)

    samples = {}
    for name, setting in SETTINGS.items():
        answers = ask(make_prompts(PROMPTS, PROMPT_TOKENS), n=count, max_tokens=TOKENS, **setting)
        samples[name] = [[list(o.token_ids) for o in answer.outputs] for answer in answers]
    accepted = {}
    for name, setting in {GREEDY: {"temperature": 0.0}, **SETTINGS}.items():
        before = engine_case.read_counters(llm)
        ask(make_prompts(FREE_PROMPTS, FREE_PROMPT_TOKENS), max_tokens=FREE_TOKENS, **setting)
        accepted[name] = _count_since(before, engine_case.read_counters(llm))
    return {"samples": samples, "accepted_at": accepted}


def _count_since(before: Row, after: Row) -> dict[str, Any]:
    def change(ending: str) -> float:
        names = [name for name in after if name.endswith(ending)]
        return float(sum(after[name] - before.get(name, 0) for name in names))

    drafted, accepted = change("num_draft_tokens"), change("num_accepted_tokens")
    steps = change("num_drafts")
    return {
        "acceptance": round(accepted / drafted, 4) if drafted else None,
        "tokens_a_step": round(1 + accepted / steps, 4) if steps else None,
        "steps": steps,
    }


def chi_square(first: Counter[Any], second: Counter[Any]) -> tuple[float, int]:
    """Return statistic and degrees of freedom of two samples with pooled rare outcomes."""
    rows: list[tuple[int, int]] = []
    rare = [0, 0]
    for outcome in first | second:
        a, b = first[outcome], second[outcome]
        if a + b < RARE:
            rare = [rare[0] + a, rare[1] + b]
        else:
            rows.append((a, b))
    if sum(rare) >= RARE:
        rows.append((rare[0], rare[1]))
    ratio = math.sqrt(second.total() / first.total())
    statistic = sum((a * ratio - b / ratio) ** 2 / (a + b) for a, b in rows)
    return statistic, len(rows) - 1


def chance(statistic: float, freedom: int) -> float:
    """Return the probability of a larger statistic (Wilson and Hilferty's approximation)."""
    if freedom < 1:
        return 1.0
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


def compare(reference: Row, sampled: Row) -> dict[str, Any]:
    """Compare the first two to ``TOKENS`` tokens of all answers, by setting and prompt.

    Tokens after the first come from drafts. ``smallest_chance`` is corrected for the number of
    tests (Bonferroni).
    """
    tests, freedom = [], 0
    for name in SETTINGS:
        for plain, drafted in zip(reference[name], sampled[name], strict=True):
            for length in range(2, TOKENS + 1):
                first, second = (
                    Counter(tuple(answer[:length]) for answer in answers)
                    for answers in (plain, drafted)
                )
                statistic, degrees = chi_square(first, second)
                tests.append(chance(statistic, degrees))
                freedom += degrees
    return {
        "tests": len(tests),
        "degrees_of_freedom": freedom,
        "answers": sum(len(answers) for name in SETTINGS for answers in sampled[name]),
        "smallest_chance": float(f"{min(1.0, min(tests) * len(tests)):.3g}"),
    }


def judge_samples(name: str, result: Row, reference: Row, *, damaged: bool) -> Row:
    numbers = compare(reference["samples"], result["samples"])
    same = numbers["smallest_chance"] >= LEVEL
    claim = f"{name}: sampled answers are distributed as without drafts"
    if damaged:
        claim = f"{name}: the test sees that answers are distributed otherwise"
    cases = [name, reference["case"]["name"]]
    return row(claim, same is not damaged, cases, level=LEVEL, **numbers)
