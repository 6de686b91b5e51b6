"""Measures a release's speed with fixed greedy requests, and compares it with earlier results."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from spark_contract import files
from spark_contract.paths import Paths
from spark_contract.release import Release
from spark_contract.tool import PHASE, SPEED

from spark_host.engine.client import Engine, EngineError
from spark_host.records import versions
from spark_host.system.programs import Report

_ROUNDS = 5
_TOKENS = 256
_PROMPT_WORDS = 1200
_STREAMS = 4
_MIN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: int
    began_s: float
    first_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class Measure:
    key: str
    title: str
    unit: str
    more_is_better: bool

    def format(self, spread: dict[str, float]) -> str:
        return f"{spread['median']:.{1 if self.more_is_better else 2}f} {self.unit}"


MEASURES = (
    Measure("one_stream_tokens_per_s", "one stream", "tokens/s", more_is_better=True),
    Measure("all_streams_tokens_per_s", "several streams", "tokens/s", more_is_better=True),
    Measure("first_token_s", "first token of a long prompt", "s", more_is_better=False),
)


class NotMeasuredError(Exception):
    """The speed could not be measured."""


def measure(release: Release, paths: Paths, limit_s: float, report: Report) -> dict[str, Any]:
    """Measure a running release for about ``limit_s`` and return the speed.

    Raises NotMeasuredError if the engine does not respond or serves other requests.
    """
    engine = Engine.for_release(release, paths)
    began = time.monotonic()
    samples: dict[str, list[float]] = defaultdict(list)
    rounds = tokens = 0
    # A round is never cut short, so it may exceed the limit.
    timeout_s = min(release.check.timeout_s, max(limit_s, _MIN_TIMEOUT_S))
    try:
        before = engine.metrics().generated
        while rounds < _ROUNDS and (not rounds or time.monotonic() - began < limit_s):
            rounds += 1
            answers = _run_round(release, engine, rounds, samples, timeout_s)
            tokens += sum(answer.tokens for answer in answers)
            report(f"{PHASE}bench round={rounds} of {_ROUNDS}")
        other_tokens = engine.metrics().generated - before - tokens
    except EngineError as error:
        raise NotMeasuredError(f"the speed was not measured: {error}") from error
    # The engine may count drafts that it does not send.
    if other_tokens > 0.05 * tokens + 16:
        text = "the speed was not measured, because the engine was serving other requests"
        raise NotMeasuredError(text)
    return {
        "at": files.now(),
        "rounds": rounds,
        "seconds": round(time.monotonic() - began, 1),
        "streams": _stream_count(release),
        **{key: _summarize(values) for key, values in samples.items()},
    }


def compare(
    now: dict[str, Any], before: dict[str, Any], worse_percent: float
) -> list[dict[str, Any]]:
    """Return the measures that got clearly worse.

    The median must be worse by more than ``worse_percent``, and the best round must be worse than
    every earlier round.
    """
    worse = []
    for item in MEASURES:
        new, old = now.get(item.key), before.get(item.key)
        if not new or not old or not old["median"]:
            continue
        ratio = new["median"] / old["median"]
        if item.more_is_better:
            percent, all_worse = 100 * (1 - ratio), new["max"] < old["min"]
        else:
            percent, all_worse = 100 * (ratio - 1), new["min"] > old["max"]
        if percent > worse_percent and all_worse:
            text = f"{item.title}: now {item.format(new)}, before {item.format(old)}"
            worse.append({"key": item.key, "percent": round(percent), "text": text})
    return worse


_COMPARISON_KEYS = ("before", "changed", "worse", "revert")


def add_comparison(
    release: Release, now: dict[str, Any], before: dict[str, Any] | None
) -> dict[str, Any]:
    """Add to a measurement what changed, what became slower, and how to revert the changes."""
    if before is None or release.check.bench is None:
        return {**now, "before": None, "changed": [], "worse": [], "revert": []}
    changed = versions.describe_changes(before["versions"], now["versions"])
    worse = compare(now, before, release.check.bench.worse_percent)
    kept = {key: before[key] for key in before if key not in _COMPARISON_KEYS}
    revert = versions.revert_hints(release.service, before, now) if worse else []
    return {**now, "before": kept, "changed": changed, "worse": worse, "revert": revert}


def describe(bench: dict[str, Any]) -> Iterator[str]:
    measured = (item for item in MEASURES if bench.get(item.key))
    numbers = (f"{item.title} {item.format(bench[item.key])}" for item in measured)
    yield f"{SPEED}{', '.join(numbers)}"
    for item in bench["worse"]:
        since = f" after {', '.join(bench['changed'])}" if bench["changed"] else ""
        yield f"clearly slower{since}: {item['text']}"
    for text in bench["revert"]:
        yield f"to revert: {text}"


def _run_round(
    release: Release, engine: Engine, number: int, samples: dict[str, list[float]], timeout_s: float
) -> list[Answer]:
    # Each prompt starts with a mark, so that the prefix cache has no hits.
    marks = [f"{number}.{index}" for index in range(_stream_count(release) + 1)]
    words = min(_PROMPT_WORDS, release.check.max_model_len // 8)
    filler = " ".join(["river", "stone", "sea", "cloud"] * (words // 4))
    long_prompt = f"[{marks[0]}] {filler}. Which of these words refer to water?"
    long = _time_answer(release, engine, long_prompt, timeout_s)
    samples["first_token_s"].append(long.first_s - long.began_s)
    single = _time_answer(release, engine, _prompt(marks[0]), timeout_s)
    if single.tokens > 1 and single.last_s > single.first_s:
        rate = (single.tokens - 1) / (single.last_s - single.first_s)
        samples["one_stream_tokens_per_s"].append(rate)
    answers = [long, single]
    if len(marks) > 2:
        with ThreadPoolExecutor(max_workers=len(marks)) as pool:
            ask = partial(_time_answer, release, engine, timeout_s=timeout_s)
            parallel = list(pool.map(ask, map(_prompt, marks[1:])))
        wall_s = max(a.last_s for a in parallel) - min(a.began_s for a in parallel)
        rate = sum(a.tokens for a in parallel) / max(wall_s, 1e-9)
        samples["all_streams_tokens_per_s"].append(rate)
        answers += parallel
    return answers


def _time_answer(release: Release, engine: Engine, prompt: str, timeout_s: float) -> Answer:
    body = {
        "model": release.names[0],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": min(_TOKENS, release.check.max_model_len // 4),
        "temperature": 0,
        "seed": 1,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    began = time.monotonic()
    first, last, tokens = 0.0, began, 0
    for event in engine.stream_chat(body, timeout_s):
        deltas = [choice.get("delta") or {} for choice in event.get("choices") or ()]
        # Some chat templates enable thinking even if the request disables it.
        keys = ("content", "reasoning", "reasoning_content")
        if any(delta.get(key) for delta in deltas for key in keys):
            last = time.monotonic()
            first = first or last
        tokens = int((event.get("usage") or {}).get("completion_tokens") or tokens)
    if not first:
        raise EngineError("a streamed response has no text")
    return Answer(tokens, began, first, last)


def _prompt(mark: str) -> str:
    return f"[{mark}] Describe in detail how a river finds its way from a spring to the sea."


def _stream_count(release: Release) -> int:
    return min(_STREAMS, release.engine.max_sequences)


def _summarize(values: Sequence[float]) -> dict[str, float]:
    numbers = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(number, 4) for name, number in numbers.items()}
