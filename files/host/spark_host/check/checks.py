"""The table of all checks, and those of the server's names, metrics and log.

docs/reference/checks.md is generated from the table. A broken server fails a ``must`` check and a
healthy one never does; it fails a start or a rollout. A healthy server may fail a ``warn`` check;
the result is reported and stored with the proof.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spark_contract import release
from spark_contract.release import MODELS

from spark_host.check import pooling, questions
from spark_host.check.probe import CheckError, Probe, Weight, short, wait_for_value
from spark_host.engine.client import EngineError
from spark_host.engine.metrics import Metrics

_DRAFTS_WANTED = 60
_ALMOST_NONE = 0.1  # a drafter without weights; a server with a poor one is slow, but healthy
_COUNTER_WAIT_S = 10.0


def listed_models(probe: Probe) -> list[dict[str, Any]]:
    try:
        reply = probe.engine.get(MODELS, probe.left_s)
        if reply.status != 200:
            raise CheckError(f"{MODELS} answers HTTP {reply.status}")
        data = reply.json().get("data")
    except EngineError as error:
        raise CheckError(f"{MODELS}: {error}") from error
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise CheckError(f"{MODELS} lists no models")
    return data


def served_names(probe: Probe) -> str:
    served = [str(item.get("id")) for item in listed_models(probe)]
    wanted = list(probe.release.names)
    if sorted(served) != sorted(wanted):
        raise CheckError(f"it serves the names {served}, the release wants {wanted}")
    return f"it serves {', '.join(served)}"


def context_length(probe: Probe) -> str:
    wanted = probe.plan.max_model_len
    for item in listed_models(probe):
        if item.get("max_model_len") != wanted:
            raise CheckError(
                f"max_model_len of {item.get('id')} is {item.get('max_model_len')}, "
                f"the release wants {wanted}"
            )
    return f"contexts of {wanted} tokens are accepted"


def counters_move(probe: Probe) -> str:
    if probe.tokens_seen == 0:
        raise CheckError("not one token was returned")
    before = probe.before.tokens if probe.before else 0.0
    moved = wait_for_value(
        lambda: probe.metrics().tokens - before, probe.tokens_seen, _COUNTER_WAIT_S
    )
    result = f"the token counters moved by {moved:.0f}"
    if moved < probe.tokens_seen:
        raise CheckError(f"{result} while {probe.tokens_seen} tokens were returned")
    return result


def acceptance(probe: Probe) -> str:
    floor = probe.plan.acceptance_floor or 0.0
    before = probe.before or Metrics(())
    drafted = accepted = 0.0
    limit = max(16, min(128, probe.plan.max_model_len // 4))
    for question in (probe.plan.questions * 8)[:8]:
        # Text of some length: the first tokens after a prompt show little about the drafter.
        probe.say(question.prompt, limit, thinking=question.thinking)
        after = probe.metrics()
        if after.drafted is None:
            raise CheckError("the engine has no counters of speculation: it is switched off")
        drafted = after.drafted - (before.drafted or 0.0)
        accepted = (after.accepted or 0.0) - (before.accepted or 0.0)
        if drafted >= _DRAFTS_WANTED:
            break
    if drafted <= 0:
        raise CheckError("not one token was drafted")
    rate = accepted / drafted
    result = f"{rate:.0%} of {drafted:.0f} drafted tokens were accepted"
    if not rate >= floor:
        weight: Weight | None = None if rate < _ALMOST_NONE else "warn"
        raise CheckError(f"{result}, the floor is {floor:.0%}", weight)
    return f"{result} (floor {floor:.0%})"


def metrics_required(probe: Probe) -> str:
    metrics = probe.metrics()
    for name, wanted in probe.plan.metrics_required.items():
        if isinstance(wanted, dict):
            labels = {str(key): str(value) for key, value in wanted.items()}
            if not metrics.has(name, labels):
                raise CheckError(f"no sample of {name} has the labels {labels}")
        else:
            value = metrics.total(name)
            if value is None or value < float(wanted):
                raise CheckError(f"{name} is {value}, the release wants at least {wanted}")
    return f"{len(probe.plan.metrics_required)} metrics match the release"


def log_lines(probe: Probe) -> str:
    lines = probe.read_log()
    for pattern in probe.plan.log_forbidden:
        line = next((line for line in lines if re.search(pattern, line)), None)
        if line is not None:
            raise CheckError(f"the log has a forbidden line: {short(line, 120)}")
    for pattern in probe.plan.log_required:
        line = next((line for line in lines if re.search(pattern, line)), None)
        if line is None:
            raise CheckError(f"the log ({len(lines)} lines) has no line matching {pattern!r}")
        probe.load_lines.append(line)
    return f"{len(probe.plan.log_required)} expected log lines found, no forbidden one"


def healthy(probe: Probe) -> str:
    try:
        status = probe.engine.get("/health", probe.left_s).status
    except EngineError as error:
        raise CheckError(f"the engine went away during the check: {error}") from error
    if status != 200:
        raise CheckError(f"/health answers HTTP {status} after the check")
    return "the engine is healthy after the check"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its lowest level, its weight, and whether a release needs it."""

    name: str
    level: str
    run: Callable[[Probe], str]
    weight: Weight
    broken_by: str
    right_and_failing: str
    wanted: Callable[[Probe], bool] = lambda _: True


def _has_questions(probe: Probe) -> bool:
    return bool(probe.plan.plain_questions)


_NEVER = "cannot"
_EASY = "cannot: any instruct model answers these questions without thinking"
_WARNS = "reported as a warning"

CHECKS = (
    Check(
        "served names", "quick", served_names, "must",
        "another engine or other arguments than the release's", _NEVER,
    ),
    Check(
        release.CONTEXT_LENGTH, "quick", context_length, "must",
        "the engine lowered the context, or read another configuration", _NEVER,
    ),
    Check(
        release.LOG_LINES, "quick", log_lines, "must",
        "other plugin, kernels or scales than the proven ones",
        "cannot: the image is named by its digest, so its messages do not change",
        lambda p: bool(p.plan.log_required or p.plan.log_forbidden),
    ),
    Check(
        "first answer", "quick", questions.first_answer, "must",
        "damaged weights, a wrong kernel, a stuck engine: garbage, one token, nothing", _EASY,
        _has_questions,
    ),
    Check(
        "answers", "full", questions.all_answers, "must",
        "damage that one short answer does not show",
        f"it thinks, and is wrong or does not finish: {_WARNS}",
        lambda p: len(p.plan.questions) > 1,
    ),
    Check(
        "copy", "full", questions.copies, "must",
        "damaged numbers: letters are lost or changed",
        "cannot: text around the string is ignored",
        lambda p: bool(p.plan.copy),
    ),
    Check(
        "stream", "full", questions.stream, "must",
        "an answer that breaks off, or lacks its end or its token count", _EASY,
        _has_questions,
    ),
    Check(
        "repeat", "full", questions.repeats, "warn",
        "states or caches that one request leaves to the next",
        "kernels add in another order, and two tokens of nearly equal probability swap",
        lambda p: p.plan.repeat and _has_questions(p),
    ),
    Check(
        "sampled", "full", questions.sampled, "must",
        "kernels of the sampler, which greedy requests never run: nothing, or one token",
        f"it samples another answer than the expected one: {_WARNS}",
        _has_questions,
    ),
    Check(
        "tool call", "full", questions.tool_call, "must",
        "a call that stays text, arguments that are not JSON or of another type",
        f"it calls no tool, or passes other values: {_WARNS}",
        lambda p: p.plan.tool_call,
    ),
    Check(
        "reasoning", "full", questions.reasoning, "must",
        "thinking that is mixed into the answer",
        f"it does not think, or answers wrong after it: {_WARNS}",
        lambda p: p.plan.reasoning and _has_questions(p),
    ),
    Check(
        "conversation", "full", questions.conversation, "must",
        "earlier turns that are lost or mixed up", _EASY,
        lambda p: p.plan.conversation and _has_questions(p),
    ),
    Check(
        "parallel", "full", questions.parallel, "must",
        "concurrent requests that get each other's answers, or none", _EASY,
        _has_questions,
    ),
    Check(
        "image", "full", questions.image, "must",
        "pictures that do not reach the model: all are called the same",
        f"it uses another word for a colour: {_WARNS}",
        lambda p: p.plan.image,
    ),
    Check(
        "sound", "full", questions.sound, "must",
        "sounds that do not reach the model: a longer one takes no more tokens",
        "cannot: the answer itself is ignored",
        lambda p: p.plan.sound,
    ),
    Check(
        "embedding", "quick", pooling.embedding, "must",
        "damaged weights, another pooling than the model's, values that are not numbers",
        "cannot: two texts have the same meaning, the third is about something else",
        lambda p: p.plan.task == "embedding",
    ),
    Check(
        "embedding in a batch", "full", pooling.embedding_repeat, "must",
        "texts of one request that change each other's embeddings", _NEVER,
        lambda p: p.plan.task == "embedding",
    ),
    Check(
        "ranking", "quick", pooling.ranking, "must",
        "damaged weights, a head that is not loaded: random order",
        "cannot: one document answers the question, the other is about something else",
        lambda p: p.plan.task == "reranking",
    ),
    Check(
        "classes", "quick", pooling.classes, "must",
        "damaged weights, a head that is not loaded, values that are not probabilities",
        "cannot: which class is right is ignored",
        lambda p: p.plan.task == "classification",
    ),
    Check(
        release.PREFIX_REUSE, "full", questions.prefix_reuse, "must",
        "prefix caching that is off, or returns other content",
        f"it does not find the number in turn 1, which uses no cache: {_WARNS}",
        lambda p: p.plan.prefix is not None,
    ),
    Check(
        release.ACCEPTANCE, "full", acceptance, "must",
        "speculation that is off, or a drafter without its weights: below 10 % accepted",
        f"below the floor and above 10 % it is slow but right: {_WARNS}",
        lambda p: p.plan.acceptance_floor is not None,
    ),
    Check(
        release.NEEDLE, "deep", questions.needle, "warn",
        "positions or caches that are damaged far from the end",
        "the model misses one number in a text that fills three quarters of its context",
        lambda p: p.plan.needle is not None,
    ),
    Check(
        release.COUNTERS, "quick", counters_move, "must",
        "metrics that stand still, so that the watchdog would miss a stall", _NEVER,
        lambda p: _has_questions(p) or p.plan.task in pooling.ASKED,
    ),
    Check(
        "metrics", "quick", metrics_required, "must",
        "a cache setting that the engine did not apply", _NEVER,
        lambda p: bool(p.plan.metrics_required),
    ),
    Check(
        release.HEALTH, "quick", healthy, "must", "an engine that died of the questions", _NEVER,
    ),
)  # fmt: skip

# The runner's own checks: name, level, what breaks it, how a healthy server could fail it.
RUNNER_CHECKS = (
    (
        release.MEMORY, "at a start",
        "less memory available than `memory.floor_gib` while it starts: the engine is stopped; or "
        "the GPU driver found no contiguous memory",
        "cannot: the host would have died; memory that other processes hold is a reason, too",
    ),
    (
        release.READY, "quick", "it ends, or does not listen within `serve.start_timeout_s`",
        "it loads from a slow disk: raise the limit",
    ),
    (
        "same run", "quick", "it was restarted during the check",
        "cannot: another run was checked than the one that serves",
    ),
)  # fmt: skip
