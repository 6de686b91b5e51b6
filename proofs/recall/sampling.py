"""Sampled answers of the recall model: their distribution and acceptance with drafts.

A drafted answer must be distributed as one without drafts. Counts of the first tokens of many
answers are compared by a chi-square test of homogeneity, whose level is fixed beforehand.
"""

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
PROMPTS, PROMPT_TOKENS, TOKENS = 4, 256, 4
PASSAGES, PASSAGE_TOKENS = 12, 8192
RARE = 20
LEVEL = 0.01


def ask_ambiguously(seed: int) -> list[int]:
    """Ask for a pair with four records, whose values have equal beginnings.

    The drafter's own words follow the first, and target and drafter doubt at different places.
    """
    source = np.random.default_rng([seed, 8])
    tokens = language.context(source, PROMPT_TOKENS, near=False, asks=False).tokens.copy()
    starts = np.flatnonzero((tokens == language.REC) & (np.arange(len(tokens)) % 8 == 0))
    records = [at for at in starts if tokens[at + 7] == language.END][:8:2]
    first, second, third = tokens[records[0] + 4 : records[0] + 7]
    other, another = tokens[records[1] + 5 : records[1] + 7]
    values = ((first, second, third), (first, second, another), (first, other, third),
              (first, other, another))  # fmt: skip
    for at, value in zip(records, values, strict=True):
        tokens[at : at + 8] = tokens[records[0] : records[0] + 8]
        tokens[at + 4 : at + 7] = value
    return [*tokens.tolist(), language.ASK, *tokens[records[0] + 1 : records[0] + 4].tolist()]


def ask_for_passages() -> tuple[list[list[int]], int]:
    source = np.random.default_rng(PASSAGE_TOKENS)
    context = language.context(source, PASSAGE_TOKENS, near=False, asks=False)
    questions = language.questions(context, 0, {"passage": PASSAGES})
    prompts = [[*context.tokens.tolist(), *question.tokens] for question in questions]
    return prompts, len(questions[0].answer)


def ask(llm: Any, prompts: list[list[int]], cooler: float, **options: Any) -> Any:
    """``cooler`` multiplies the temperature, as a damage."""
    from vllm import SamplingParams

    from proofs.engine import case as engine_case

    options["temperature"] *= cooler
    sampling = SamplingParams(ignore_eos=True, detokenize=False, **options)
    requests = [engine_case.to_request(prompt) for prompt in prompts]
    return llm.generate(requests, sampling, use_tqdm=False)


def draw(
    llm: Any, prompts: list[list[int]], settings: dict[str, Row], count: int, cooler: float
) -> Row:
    """Return ``count`` answers to each prompt by setting."""
    samples = {}
    for name, setting in settings.items():
        answers = ask(llm, prompts, cooler, n=count, max_tokens=TOKENS, **setting)
        samples[name] = [[list(o.token_ids) for o in answer.outputs] for answer in answers]
    return samples


def sample(llm: Any, count: int, cooler: float) -> Row:
    """Return answers to ambiguous prompts, and the acceptance of drafts by setting."""
    from proofs.engine import case as engine_case

    prompts = [ask_ambiguously(seed) for seed in range(PROMPTS)]
    samples = draw(llm, prompts, SETTINGS, count, cooler)
    accepted = {}
    passages, length = ask_for_passages()
    for name, setting in {GREEDY: {"temperature": 0.0}, **SETTINGS}.items():
        before = engine_case.read_counters(llm)
        ask(llm, passages, cooler, max_tokens=length, **setting)
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
    for name in reference:
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
        "answers": sum(len(answers) for name in reference for answers in sampled[name]),
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
