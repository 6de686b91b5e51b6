"""How fast a release answers, measured in a limited time and compared with its last proof.

The numbers are made to be compared with themselves: the same greedy requests on the same host
before and after an upgrade. They are no benchmark of a model.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from spark_contract import files
from spark_contract.paths import Paths
from spark_contract.release import Release
from spark_contract.tool import PHASE, SPEED

from spark_host.engine.client import Engine, EngineError
from spark_host.records import upgrades
from spark_host.system.programs import Report

_ROUNDS = 5
_TOKENS = 256
_PROMPT_WORDS = 1200
_STREAMS = 4
_REQUEST_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer: its tokens and the moments that count, in monotonic seconds."""

    tokens: int
    began_s: float
    first_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class Measure:
    """One number a person cares about; ``up`` tells whether more of it is better."""

    key: str
    what: str
    unit: str
    up: bool


MEASURES = (
    Measure("one_stream_tokens_per_s", "one stream", "tokens/s", up=True),
    Measure("all_streams_tokens_per_s", "several streams", "tokens/s", up=True),
    Measure("first_token_s", "first token of a long prompt", "s", up=False),
)


@dataclass(slots=True)
class Samples:
    """What the rounds found, by measure."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: int = 0
    rounds: int = 0


class NotMeasuredError(Exception):
    """There is no number to compare; the message is a plain sentence."""


def measure(release: Release, paths: Paths, limit_s: float, report: Report) -> dict[str, Any]:
    """Return the speed of a running release, measured for at most about ``limit_s``.

    Raises:
        NotMeasuredError: The engine did not answer, or worked for others meanwhile.
    """
    engine = Engine.of(release, paths)
    begun = time.monotonic()
    samples = Samples()
    # A round that has begun is finished: half of one says nothing.
    timeout_s = min(release.check.timeout_s, max(limit_s, _REQUEST_S))
    try:
        counted = engine.metrics().generated
        while samples.rounds < _ROUNDS and (
            not samples.rounds or time.monotonic() - begun < limit_s
        ):
            _round(release, engine, samples, timeout_s)
            report(f"{PHASE}bench round={samples.rounds} of {_ROUNDS}")
        others = engine.metrics().generated - counted - samples.tokens
    except EngineError as error:
        raise NotMeasuredError(f"no speed was measured: {error}") from error
    # An answer cut at its limit may be counted one step of drafts longer than it was sent.
    if others > 0.05 * samples.tokens + 16:
        raise NotMeasuredError("no speed was measured: the engine worked for others meanwhile")
    return {
        "at": files.now(),
        "rounds": samples.rounds,
        "seconds": round(time.monotonic() - begun, 1),
        "streams": _streams(release),
        **{key: _spread(values) for key, values in samples.values.items()},
    }


def compare(
    now: dict[str, Any], before: dict[str, Any], worse_percent: float
) -> list[dict[str, Any]]:
    """Return the measures that got clearly worse.

    Clearly: the median is worse by more than ``worse_percent``, and the best round of now is worse
    than the worst round of before, so that noise alone says nothing.
    """
    found = []
    for item in MEASURES:
        new, old = now.get(item.key), before.get(item.key)
        if not new or not old or not old["median"]:
            continue
        ratio = new["median"] / old["median"]
        slower = 100 * (1 - ratio) if item.up else 100 * (ratio - 1)
        apart = new["max"] < old["min"] if item.up else new["min"] > old["max"]
        if slower > worse_percent and apart:
            text = f"{item.what}: {_number(new, item)}, {_number(old, item)} before"
            found.append({"key": item.key, "percent": round(slower), "text": text})
    return found


def judged(release: Release, now: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Return a measurement with what changed since the one before, what is worse, the way back."""
    if before is None or release.check.bench is None:
        return {**now, "before": None, "changed": [], "worse": [], "way_back": []}
    changed = upgrades.changed(before["versions"], now["versions"])
    worse = compare(now, before, release.check.bench.worse_percent)
    kept = {key: before[key] for key in before if key not in _JUDGEMENT}
    back = upgrades.way_back(release.service, before, now) if worse else []
    return {**now, "before": kept, "changed": changed, "worse": worse, "way_back": back}


_JUDGEMENT = ("before", "changed", "worse", "way_back")


def sentences(found: dict[str, Any]) -> Iterator[str]:
    """Yield what a person wants to know of a judged measurement."""
    numbers = (
        f"{item.what} {_number(found[item.key], item)}" for item in MEASURES if found.get(item.key)
    )
    yield f"{SPEED}{', '.join(numbers)}"
    for item in found["worse"]:
        since = f" after {', '.join(found['changed'])}" if found["changed"] else ""
        yield f"clearly slower{since}: {item['text']}"
    for text in found["way_back"]:
        yield f"way back: {text}"


def _round(release: Release, engine: Engine, samples: Samples, timeout_s: float) -> None:
    samples.rounds += 1
    # Each prompt begins differently, so that no cache of prefixes answers for the engine.
    marks = [f"{samples.rounds}.{index}" for index in range(_streams(release) + 1)]
    alone = _ask(release, engine, _long_prompt(release, marks[0]), timeout_s)
    samples.values["first_token_s"].append(alone.first_s - alone.began_s)
    single = _ask(release, engine, _prompt(marks[0]), timeout_s)
    if single.tokens > 1 and single.last_s > single.first_s:
        rate = (single.tokens - 1) / (single.last_s - single.first_s)
        samples.values["one_stream_tokens_per_s"].append(rate)
    answers = [alone, single]
    if len(marks) > 2:
        together = _ask_together(release, engine, marks[1:], timeout_s)
        wall_s = max(a.last_s for a in together) - min(a.began_s for a in together)
        rate = sum(a.tokens for a in together) / max(wall_s, 1e-9)
        samples.values["all_streams_tokens_per_s"].append(rate)
        answers += together
    samples.tokens += sum(answer.tokens for answer in answers)


def _ask_together(
    release: Release, engine: Engine, marks: Sequence[str], timeout_s: float
) -> list[Answer]:
    with ThreadPoolExecutor(max_workers=len(marks)) as pool:
        asked = [pool.submit(_ask, release, engine, _prompt(mark), timeout_s) for mark in marks]
        return [answer.result() for answer in asked]


def _ask(release: Release, engine: Engine, prompt: str, timeout_s: float) -> Answer:
    body = {
        "model": release.names[0],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": min(_TOKENS, release.check.max_model_len // 4),
        "temperature": 0,
        "seed": 1,
        # A model that is done early goes on with special tokens: they take as long as words.
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    began = time.monotonic()
    first, last, tokens = 0.0, began, 0
    for event in engine.stream_chat(body, timeout_s):
        if any(_said(choice.get("delta") or {}) for choice in event.get("choices") or ()):
            last = time.monotonic()
            first = first or last
        tokens = int((event.get("usage") or {}).get("completion_tokens") or tokens)
    if not first:
        raise EngineError("a streamed answer came without text")
    return Answer(tokens, began, first, last)


def _said(delta: dict[str, Any]) -> bool:
    """Tell whether an event carries text; some templates think however they are asked not to."""
    return any(delta.get(key) for key in ("content", "reasoning", "reasoning_content"))


def _prompt(mark: str) -> str:
    return f"[{mark}] Describe in detail how a river finds its way from a spring to the sea."


def _long_prompt(release: Release, mark: str) -> str:
    # Far below the limit of the context whatever the tokenizer makes of a word.
    words = min(_PROMPT_WORDS, release.check.max_model_len // 8)
    filler = " ".join(["river", "stone", "sea", "cloud"] * (words // 4))
    return f"[{mark}] {filler}. Which of these words name water?"


def _streams(release: Release) -> int:
    return min(_STREAMS, release.engine.max_sequences)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def _number(spread: dict[str, float], item: Measure) -> str:
    return f"{spread['median']:.{1 if item.up else 2}f} {item.unit}"
