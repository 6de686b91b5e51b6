"""Questions of the check to pooling models: embeddings, rankings, classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from spark_contract.release import EMBEDDINGS, RERANK

from spark_host.check.probe import CheckError, Probe, short
from spark_host.engine.client import EngineError

_QUESTION = "How do I bake bread at home?"
_NEAR = "How do I bake bread at home without a machine?"
_FAR = "The central bank raised interest rates by a quarter of a point on Thursday."


def embedding(probe: Probe) -> str:
    answer = _ask(probe, EMBEDDINGS, {"input": [_QUESTION, _NEAR, _FAR]})
    vectors = [_vector(item) for item in _list(answer, "data")]
    sizes = {len(vector) for vector in vectors}
    if len(vectors) != 3 or len(sizes) != 1:
        raise CheckError(f"three texts gave {len(vectors)} embeddings of {sorted(sizes)} numbers")
    width = probe.plan.width
    if width is not None and sizes != {width}:
        raise CheckError(f"an embedding has {sizes.pop()} numbers, the model's width is {width}")
    near, far = (_cosine(vectors[0], other) for other in vectors[1:])
    if not near > far:
        raise CheckError(f"a similar text is not nearer ({near:.3f}) than another ({far:.3f})")
    return f"{len(vectors[0])} numbers; similar texts {near:.3f}, others {far:.3f}"


def embedding_repeat(probe: Probe) -> str:
    alone = _list(_ask(probe, EMBEDDINGS, {"input": [_QUESTION]}), "data")
    batch = _list(_ask(probe, EMBEDDINGS, {"input": [_FAR, _QUESTION, _NEAR]}), "data")
    first, second = _vector(alone[0]), _vector((batch + [None] * 2)[1])
    same = _cosine(first, second) if len(first) == len(second) else 0.0
    if same < 0.99:
        raise CheckError(f"the same text has another embedding in a batch (cosine {same:.3f})")
    return f"the same text has the same embedding in a batch (cosine {same:.4f})"


def ranking(probe: Probe) -> str:
    answer = _ask(probe, RERANK, {"query": _QUESTION, "documents": [_FAR, _NEAR]})
    scores: dict[Any, float] = {}
    for item in _list(answer, "results"):
        score = item.get("relevance_score") if isinstance(item, dict) else None
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise CheckError(f"a relevance is not a finite number: {short(str(item))}")
        scores[item.get("index")] = score
    if set(scores) != {0, 1}:
        raise CheckError(f"two documents were ranked as {sorted(map(str, scores))}")
    result = f"the document that answers scored {scores[1]:.3f}, the other {scores[0]:.3f}"
    if not scores[1] > scores[0]:
        raise CheckError(result)
    return result


def classes(probe: Probe) -> str:
    alone, *_ = _probabilities(probe, [_QUESTION])
    batch = _probabilities(probe, [_FAR, _QUESTION])
    if len(batch) != 2 or any(len(numbers) != len(alone) for numbers in batch):
        sizes = [len(numbers) for numbers in batch]
        raise CheckError(f"two texts got {sizes} classes, one text {len(alone)}")
    if max(abs(a - b) for a, b in zip(alone, batch[1], strict=True)) > 0.02:
        raise CheckError("the same text got other classes in a batch")
    if len(alone) > 1 and batch[0] == batch[1]:
        raise CheckError("two texts about different things got the very same numbers")
    return f"{len(alone)} classes, the same in a batch"


def _probabilities(probe: Probe, texts: list[str]) -> list[list[float]]:
    answer = _ask(probe, "/classify", {"input": texts})
    rows = []
    for item in _list(answer, "data"):
        numbers = item.get("probs") if isinstance(item, dict) else None
        if not isinstance(numbers, list) or not numbers:
            raise CheckError("the answer has no probabilities")
        if not all(type(n) in (int, float) and 0 <= n <= 1 for n in numbers):
            raise CheckError(f"not a probability: {short(str(numbers))}")
        if len(numbers) > 1 and abs(sum(numbers) - 1) > 0.02:
            raise CheckError(f"{len(numbers)} class probabilities add up to {sum(numbers)}")
        rows.append([float(n) for n in numbers])
    return rows


def _ask(probe: Probe, path: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = probe.engine.ask(path, {"model": probe.model, **body}, probe.left_s)
    except EngineError as error:
        raise CheckError(f"{path}: {error}", "must") from error
    usage = answer.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    if isinstance(tokens, int) and tokens > 0:
        probe.tokens_seen += tokens
    return answer


def _list(answer: dict[str, Any], key: str) -> list[Any]:
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
    lengths = math.hypot(*a) * math.hypot(*b)
    if not lengths:
        raise CheckError("an embedding is all zeros")
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths


# The question that shows whether a model of a task answers.
ASKED: dict[str | None, Callable[[Probe], str]] = {
    "embedding": embedding,
    "reranking": ranking,
    "classification": classes,
}
