"""Time a running request next to a long prompt, and the first tokens of a session's turns."""

import itertools
import statistics
import time
from typing import Any

from proofs.judges.answers import row
from proofs.prompts import random_prompts

RUNNING_TOKENS, LONG_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 1000, 30_000, 1000, 32
STEPS_BEFORE, MANY = 10, 4000


def measure(llm: Any) -> dict[str, Any]:
    """Measure with the engine's limit for long prompts and without; the first run compiles."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.scheduler_config
    limit = scheduler.long_prefill_token_threshold
    lengths = [*[RUNNING_TOKENS, LONG_TOKENS] * 3, LONG_TOKENS, LONG_TOKENS, TURN_TOKENS]
    *prompts, session, new, turn = random_prompts(lengths)
    beside = {}
    for name, tokens in (("compiling", limit), ("limited", limit), ("unlimited", 0)):
        scheduler.long_prefill_token_threshold = tokens
        long, running = prompts.pop(), prompts.pop()
        gaps = _beside_long_prompt(llm.llm_engine, running, long)
        beside[name] = {"limit_tokens": tokens, **gaps}
    scheduler.long_prefill_token_threshold = limit
    first, answer = _first_token(llm, session)
    later, _ = _first_token(llm, [*session, *answer, *turn])
    without, _ = _first_token(llm, [*new, *answer, *turn])
    return {"beside": beside, "turns": {"first": first, "later": later, "without cache": without}}


def _sampling(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def _beside_long_prompt(engine: Any, running: list[int], long: list[int]) -> dict[str, Any]:
    """Return the gaps between a request's tokens until another request's first token."""
    engine.add_request("running", {"prompt_token_ids": running}, _sampling(MANY))
    for _ in range(STEPS_BEFORE):
        engine.step()
    arrivals, outputs = [time.perf_counter()], set()
    engine.add_request("long", {"prompt_token_ids": long}, _sampling(1))
    while "long" not in outputs:
        outputs = {output.request_id for output in engine.step()}
        if "running" in outputs:
            arrivals.append(time.perf_counter())
    ended_s = time.perf_counter() - arrivals[0]
    engine.abort_request(["running"])
    while engine.has_unfinished_requests():
        engine.step()
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    return {
        "answers": len(gaps),
        "median_gap_s": round(statistics.median(gaps), 4),
        "longest_gap_s": round(max(gaps), 4),
        "long_prompt_s": round(ended_s, 4),
    }


def _first_token(llm: Any, prompt: list[int]) -> tuple[dict[str, Any], list[int]]:
    engine = llm.llm_engine
    begin, first_s, last = time.perf_counter(), 0.0, None
    engine.add_request("turn", {"prompt_token_ids": prompt}, _sampling(ANSWER_TOKENS))
    while engine.has_unfinished_requests():
        for output in engine.step():
            first_s, last = first_s or time.perf_counter() - begin, output
    numbers = {"tokens": len(prompt), "cached_tokens": last.num_cached_tokens}
    return {**numbers, "first_token_s": round(first_s, 4)}, list(last.outputs[0].token_ids)


def judge(name: str, result: dict[str, Any], block_tokens: int) -> list[dict[str, Any]]:
    """Judge steps and cache hits; times have no verdict."""
    beside, turns = result["beside"], result["turns"]
    limited, unlimited = beside["limited"], beside["unlimited"]
    blocks, found = LONG_TOKENS // block_tokens, turns["later"]["cached_tokens"]
    ratios = {
        "longest_gap": round(unlimited["longest_gap_s"] / limited["longest_gap_s"], 2),
        "long_prompt": round(unlimited["long_prompt_s"] / limited["long_prompt_s"], 2),
        "first_token": round(
            turns["without cache"]["first_token_s"] / turns["later"]["first_token_s"], 2
        ),
    }
    return [
        row(
            f"{name}: a running request gets tokens at each cache block of another's long prompt",
            limited["answers"] >= blocks > unlimited["answers"],
            [name],
            **beside,
            unlimited_over_limited=ratios,
        ),
        row(
            f"{name}: a later turn computes at most its new tokens and two cache blocks",
            found >= LONG_TOKENS - 2 * block_tokens and not turns["first"]["cached_tokens"],
            [name],
            **turns,
        ),
    ]
