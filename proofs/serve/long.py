"""Sample a real engine's progress metrics during long prompts, with the watchdog's code."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spark_contract.release import COMPLETIONS, Watch
from spark_host.engine.client import Engine, Metrics, Sample
from spark_host.watch.watchdog import StallDetector

from proofs.judges.answers import row
from proofs.prompts import random_prompts
from proofs.releases.asking import TIMEOUT_S

CACHE_BYTES = 8 << 30
PROMPT_TOKENS = 250_000
TOGETHER = 4
EVERY_S = 0.01
PARTS = 4
"""A stall limit of this fraction of a prompt's time must be safe."""


class Sampler:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: list[dict[str, float]] = []
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            metrics = self.engine.metrics(TIMEOUT_S)
            tokens, usage = metrics.progress
            line = {"s": time.monotonic(), "running": metrics.running}
            self.seen.append({**line, "tokens": tokens, "usage": usage})
            self._over.wait(EVERY_S)

    def during(self, work: Any) -> list[dict[str, float]]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            work()
        finally:
            self._over.set()
            thread.join()
        return self.seen


def talk(engine: Engine, model: str) -> dict[str, Any]:
    prompts = random_prompts([PROMPT_TOKENS - number for number in range(TOGETHER + 1)])
    _read(engine, model, prompts[0][:9000])
    alone = Sampler(engine).during(lambda: _read(engine, model, prompts[0]))
    with ThreadPoolExecutor(TOGETHER) as pool:
        many = Sampler(engine).during(
            lambda: list(pool.map(lambda ids: _read(engine, model, ids), prompts[1:]))
        )
    return {"one prompt": _from_zero(alone), "four prompts": _from_zero(many)}


def _read(engine: Engine, model: str, ids: list[int]) -> None:
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}
    used = engine.ask(COMPLETIONS, body, TIMEOUT_S)["usage"]["prompt_tokens"]
    if used != len(ids):
        raise ValueError(f"{used} prompt tokens instead of {len(ids)}")


def _from_zero(seen: list[dict[str, float]]) -> list[dict[str, float]]:
    start = seen[0]["s"]
    return [{**line, "s": round(line["s"] - start, 4)} for line in seen]


def judge(result: dict[str, Any], profile: str) -> list[dict[str, Any]]:
    """Judge that cache usage changes while the token count does not."""
    if result["state"] != "served":
        claim = f"{profile}, long prompts: the arguments serve over HTTP"
        return [row(claim, False, [], state=result["state"])]
    return [
        _moves(result[prompts], f"{profile}, {prompts}")
        for prompts in ("one prompt", "four prompts")
    ]


def _moves(seen: list[dict[str, float]], name: str) -> dict[str, Any]:
    running = [line for line in seen if line["running"] > 0]
    took_s = running[-1]["s"] - running[0]["s"]
    flat_s = _longest_flat_s(running, ("tokens", "usage"))
    numbers = {
        "seconds": round(took_s, 3),
        "samples": len(running),
        "shares_in_use_seen": len({line["usage"] for line in running}),
        "token_counts_seen": len({line["tokens"] for line in running}),
        "longest_without_progress_s": round(flat_s, 3),
        "longest_with_tokens_alone_s": round(_longest_flat_s(running, ("tokens",)), 3),
        "stall_limit_s": round(took_s / PARTS, 3),
        "stalled": _stalled(running, took_s / PARTS, cache=True),
        "stalled_by_tokens_alone": _stalled(running, took_s / PARTS, cache=False),
    }
    passed = not numbers["stalled"] and numbers["shares_in_use_seen"] > PARTS
    claim = f"{name} of {PROMPT_TOKENS:,} tokens: the watchdog's metrics change all the time"
    return row(claim, passed, [], **numbers)


def _longest_flat_s(seen: list[dict[str, float]], keys: tuple[str, ...]) -> float:
    longest, since = 0.0, seen[0]
    for line in seen:
        if any(line[key] != since[key] for key in keys):
            since = line
        longest = max(longest, line["s"] - since["s"])
    return longest


def _stalled(seen: list[dict[str, float]], limit_s: float, *, cache: bool) -> bool:
    """Return whether the watchdog would have stopped this engine at ``limit_s``."""
    judge = StallDetector(Watch(limit_s, EVERY_S, None))
    names = {"vllm:num_requests_running": "running", "vllm:generation_tokens_total": "tokens"}
    if cache:
        names["vllm:kv_cache_usage_perc"] = "usage"
    reasons = [
        judge.add_metrics(
            Metrics(tuple(Sample(name, {}, line[key]) for name, key in names.items())), line["s"]
        )
        for line in seen
    ]
    return any(reasons)
