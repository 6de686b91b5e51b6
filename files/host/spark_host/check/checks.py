"""The table of all checks, and the checks of pooling models, names, metrics and log lines.

docs/reference/checks.md explains each. A healthy server never fails a ``must`` check, but may fail
a ``warn`` check, which is only reported and stored with the proof.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spark_contract import release
from spark_contract.release import EMBEDDINGS, MODELS, RERANK, CheckPlan

from spark_host.check import questions
from spark_host.check.probe import CheckError, Probe, Severity, quote, wait_for_value
from spark_host.engine.client import EngineError, Metrics

_QUESTION = "How do I bake bread at home?"
_NEAR = "How do I bake bread at home without a machine?"
_FAR = "The central bank raised interest rates by a quarter of a point on Thursday."


def check_embedding(probe: Probe) -> str:
    items = _query(probe, EMBEDDINGS, {"input": [_QUESTION, _NEAR, _FAR]})
    vectors = [_vector(item) for item in items]
    sizes = {len(vector) for vector in vectors}
    if len(vectors) != 3 or len(sizes) != 1:
        raise CheckError(
            f"three texts gave {len(vectors)} embeddings of {sorted(sizes)} dimensions"
        )
    width = probe.plan.width
    if width is not None and sizes != {width}:
        text = f"an embedding has {sizes.pop()} dimensions, but the model's width is {width}"
        raise CheckError(text)
    near, far = (_cosine(vectors[0], other) for other in vectors[1:])
    if not near > far:
        text = f"a similar text (cosine {near:.3f}) is not closer than a different text ({far:.3f})"
        raise CheckError(text)
    cosines = f"cosine {near:.3f} for a similar text and {far:.3f} for a different text"
    return f"{len(vectors[0])} dimensions; {cosines}"


def check_embedding_repeat(probe: Probe) -> str:
    alone = _query(probe, EMBEDDINGS, {"input": [_QUESTION]})
    batch = _query(probe, EMBEDDINGS, {"input": [_FAR, _QUESTION, _NEAR]})
    first = _vector(alone[0])
    second = _vector(batch[1] if len(batch) > 1 else None)
    cosine = _cosine(first, second) if len(first) == len(second) else 0.0
    if cosine < 0.99:
        text = f"a text gets a different embedding in a batch than on its own (cosine {cosine:.3f})"
        raise CheckError(text)
    return f"a text gets the same embedding in a batch and on its own (cosine {cosine:.4f})"


def check_ranking(probe: Probe) -> str:
    scores: dict[Any, float] = {}
    body = {"query": _QUESTION, "documents": [_FAR, _NEAR]}
    for item in _query(probe, RERANK, body, "results"):
        score = item.get("relevance_score") if isinstance(item, dict) else None
        if not isinstance(score, int | float) or not math.isfinite(score):
            text = f"invalid relevance score {quote(str(item))}, expected a finite number"
            raise CheckError(text)
        scores[item.get("index")] = score
    if set(scores) != {0, 1}:
        raise CheckError(f"expected scores for documents 0 and 1, got {sorted(map(str, scores))}")
    result = f"the correct document scored {scores[1]:.3f}, the other {scores[0]:.3f}"
    if not scores[1] > scores[0]:
        raise CheckError(result)
    return result


def check_classification(probe: Probe) -> str:
    alone, *_ = _probabilities(probe, [_QUESTION])
    batch = _probabilities(probe, [_FAR, _QUESTION])
    if len(batch) != 2 or any(len(numbers) != len(alone) for numbers in batch):
        sizes = [len(numbers) for numbers in batch]
        text = f"texts in a batch have {sizes} classes, but a single text has {len(alone)}"
        raise CheckError(text)
    if max(abs(a - b) for a, b in zip(alone, batch[1], strict=True)) > 0.02:
        raise CheckError("a text has different class probabilities in a batch than on its own")
    if len(alone) > 1 and batch[0] == batch[1]:
        raise CheckError("two texts on different subjects have identical class probabilities")
    return f"{len(alone)} classes, with the same probabilities alone and in a batch"


def _probabilities(probe: Probe, texts: list[str]) -> list[list[float]]:
    rows = []
    for item in _query(probe, "/classify", {"input": texts}):
        numbers = item.get("probs") if isinstance(item, dict) else None
        if not isinstance(numbers, list) or not numbers:
            raise CheckError("the answer has no probabilities")
        if not all(type(n) in (int, float) and 0 <= n <= 1 for n in numbers):
            raise CheckError(f"invalid probabilities {quote(str(numbers))}, expected 0 to 1")
        if len(numbers) > 1 and abs(sum(numbers) - 1) > 0.02:
            raise CheckError(f"{len(numbers)} class probabilities add up to {sum(numbers)}")
        rows.append([float(n) for n in numbers])
    return rows


def _query(probe: Probe, path: str, body: dict[str, Any], key: str = "data") -> list[Any]:
    try:
        answer = probe.engine.ask(path, {"model": probe.model, **body}, probe.remaining_s)
    except EngineError as error:
        raise CheckError(f"{path}: {error}", "must") from error
    usage = answer.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    if isinstance(tokens, int) and tokens > 0:
        probe.tokens_seen += tokens
    items = answer.get(key)
    if not isinstance(items, list) or not items:
        raise CheckError(f"the answer has no {key}")
    return items


def _vector(item: Any) -> list[float]:
    numbers = item.get("embedding") if isinstance(item, dict) else None
    if not isinstance(numbers, list) or not numbers:
        raise CheckError("the answer has no embedding")
    if not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
        raise CheckError("an embedding contains a value that is not a finite number")
    return [float(n) for n in numbers]


def _cosine(a: list[float], b: list[float]) -> float:
    product_of_lengths = math.hypot(*a) * math.hypot(*b)
    if not product_of_lengths:
        raise CheckError("an embedding is all zeros")
    return sum(x * y for x, y in zip(a, b, strict=True)) / product_of_lengths


# The check that shows whether a model for a task answers.
POOLING_CHECKS: dict[str | None, Callable[[Probe], str]] = {
    "embedding": check_embedding,
    "reranking": check_ranking,
    "classification": check_classification,
}


_MIN_DRAFTS = 60
_ALMOST_NONE = 0.1  # a drafter without weights accepts this share
_COUNTER_WAIT_S = 10.0


def list_models(probe: Probe) -> list[dict[str, Any]]:
    try:
        reply = probe.engine.get(MODELS, probe.remaining_s)
        if reply.status != 200:
            raise CheckError(f"{MODELS} returned HTTP {reply.status}")
        data = reply.json().get("data")
    except EngineError as error:
        raise CheckError(f"{MODELS}: {error}") from error
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise CheckError(f"{MODELS} returned no list of models")
    return data


def check_served_names(probe: Probe) -> str:
    served = [str(item.get("id")) for item in list_models(probe)]
    names = list(probe.release.names)
    if sorted(served) != sorted(names):
        raise CheckError(f"the engine serves the names {served}, but the release requires {names}")
    return f"the engine serves {', '.join(served)}"


def check_context_length(probe: Probe) -> str:
    required = probe.plan.max_model_len
    for item in list_models(probe):
        if item.get("max_model_len") != required:
            raise CheckError(
                f"max_model_len of {item.get('id')} is {item.get('max_model_len')}, "
                f"but the release requires {required}"
            )
    return f"the context length is {required} tokens"


def check_token_counters(probe: Probe) -> str:
    if probe.tokens_seen == 0:
        raise CheckError("no tokens were returned")
    before = probe.metrics_before.tokens if probe.metrics_before else 0.0
    increase = wait_for_value(
        lambda: probe.metrics().tokens - before, probe.tokens_seen, _COUNTER_WAIT_S
    )
    result = f"the token counters grew by {increase:.0f}"
    if increase < probe.tokens_seen:
        raise CheckError(f"{result}, but {probe.tokens_seen} tokens were returned")
    return result


def check_acceptance(probe: Probe) -> str:
    minimum = probe.plan.acceptance_floor or 0.0
    before = probe.metrics_before or Metrics(())
    drafted = accepted = 0.0
    max_tokens = max(16, min(128, probe.plan.max_model_len // 4))
    for question in (probe.plan.questions * 8)[:8]:
        # Drafts are rarely accepted in the first tokens of an answer.
        probe.ask(question.prompt, max_tokens, thinking=question.thinking)
        after = probe.metrics()
        if after.drafted is None:
            raise CheckError("the engine has no speculation counters: speculation is off")
        drafted = after.drafted - (before.drafted or 0.0)
        accepted = (after.accepted or 0.0) - (before.accepted or 0.0)
        if drafted >= _MIN_DRAFTS:
            break
    if drafted <= 0:
        raise CheckError("no tokens were drafted")
    rate = accepted / drafted
    result = f"{rate:.0%} of {drafted:.0f} drafted tokens were accepted"
    if not rate >= minimum:
        severity: Severity | None = None if rate < _ALMOST_NONE else "warn"
        raise CheckError(f"{result}, but the minimum is {minimum:.0%}", severity)
    return f"{result} (minimum {minimum:.0%})"


def check_metrics_required(probe: Probe) -> str:
    metrics = probe.metrics()
    for name, required in probe.plan.metrics_required.items():
        if isinstance(required, dict):
            labels = {str(key): str(value) for key, value in required.items()}
            if not metrics.has(name, labels):
                raise CheckError(f"no sample of {name} has the labels {labels}")
        else:
            value = metrics.total(name)
            if value is None or value < float(required):
                raise CheckError(f"{name} is {value}, but the release requires at least {required}")
    return f"{len(probe.plan.metrics_required)} metrics match the release"


def check_log_lines(probe: Probe) -> str:
    lines = probe.read_log()
    for pattern in probe.plan.log_forbidden:
        line = next((line for line in lines if re.search(pattern, line)), None)
        if line is not None:
            raise CheckError(f"the log contains a forbidden line: {quote(line, 120)}")
    for pattern in probe.plan.log_required:
        line = next((line for line in lines if re.search(pattern, line)), None)
        if line is None:
            raise CheckError(f"the log ({len(lines)} lines) has no line matching {pattern!r}")
        probe.load_lines.append(line)
    return (
        f"{len(probe.plan.log_required)} required log lines are present, "
        "and there are no forbidden lines"
    )


def check_health(probe: Probe) -> str:
    try:
        status = probe.engine.get("/health", probe.remaining_s).status
    except EngineError as error:
        raise CheckError(f"the engine stopped responding during the check: {error}") from error
    if status != 200:
        raise CheckError(f"/health returned HTTP {status} after the check")
    return "the engine is healthy after the check"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    level: str  # the lowest level that includes the check
    severity: Severity
    run: Callable[[Probe], str]
    applies: Callable[[CheckPlan], object] = lambda _: True


def _has_questions(plan: CheckPlan) -> bool:
    return bool(plan.plain_questions)


CHECKS = (
    Check("served names", "quick", "must", check_served_names),
    Check(release.CONTEXT_LENGTH, "quick", "must", check_context_length),
    Check(
        release.LOG_LINES, "quick", "must", check_log_lines,
        lambda p: p.log_required or p.log_forbidden,
    ),
    Check(
        "first answer", "quick", "must",
        lambda probe: questions.check_answers(probe, probe.plan.plain_questions[:1]),
        _has_questions,
    ),
    Check("answers", "full", "must", questions.check_answers, lambda p: p.questions[1:]),
    Check("copy", "full", "must", questions.check_copies, lambda p: p.copy),
    Check("stream", "full", "must", questions.check_stream, _has_questions),
    Check(
        "repeat", "full", "warn", questions.check_repeated_answer,
        lambda p: p.repeat and _has_questions(p),
    ),
    Check("sampled", "full", "must", questions.check_sampled_answers, _has_questions),
    Check("tool call", "full", "must", questions.check_tool_call, lambda p: p.tool_call),
    Check(
        "reasoning", "full", "must", questions.check_reasoning,
        lambda p: p.reasoning and _has_questions(p),
    ),
    Check(
        "conversation", "full", "must", questions.check_conversation,
        lambda p: p.conversation and _has_questions(p),
    ),
    Check("parallel", "full", "must", questions.check_parallel_streams, _has_questions),
    Check("image", "full", "must", questions.check_image, lambda p: p.image),
    Check("sound", "full", "must", questions.check_sound, lambda p: p.sound),
    Check("embedding", "quick", "must", check_embedding, lambda p: p.task == "embedding"),
    Check(
        "embedding in a batch", "full", "must", check_embedding_repeat,
        lambda p: p.task == "embedding",
    ),
    Check("ranking", "quick", "must", check_ranking, lambda p: p.task == "reranking"),
    Check("classes", "quick", "must", check_classification, lambda p: p.task == "classification"),
    Check(release.PREFIX_REUSE, "full", "must", questions.check_prefix_reuse, lambda p: p.prefix),
    Check(
        release.ACCEPTANCE, "full", "must", check_acceptance,
        lambda p: p.acceptance_floor is not None,
    ),
    Check(release.NEEDLE, "deep", "warn", questions.check_needle, lambda p: p.needle),
    Check(
        release.COUNTERS, "quick", "must", check_token_counters,
        lambda p: _has_questions(p) or p.task in POOLING_CHECKS,
    ),
    Check("metrics", "quick", "must", check_metrics_required, lambda p: p.metrics_required),
    Check(release.HEALTH, "quick", "must", check_health),
)  # fmt: skip
