"""Checks of engines that answer with numbers: embeddings, rankings, classes."""

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
    """Texts that say the same are nearer to each other than those that do not."""
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
        raise CheckError(
            f"a text is not nearer to its like ({near:.3f}) than to another ({far:.3f})"
        )
    return f"{len(vectors[0])} numbers; like texts {near:.3f}, others {far:.3f}"


def embedding_repeat(probe: Probe) -> str:
    """The same text gives the same embedding, whatever is computed beside it."""
    alone = _ask(probe, EMBEDDINGS, {"input": [_QUESTION]})
    beside = _ask(probe, EMBEDDINGS, {"input": [_FAR, _QUESTION, _NEAR]})
    first = _vector(_list(alone, "data")[0])
    second = _vector((_list(beside, "data") + [None] * 2)[1])
    same = _cosine(first, second) if len(first) == len(second) else 0.0
    if same < 0.99:
        raise CheckError(f"the same text gave another embedding beside others ({same:.3f})")
    return f"the same text gave the same embedding beside others ({same:.4f})"


def ranking(probe: Probe) -> str:
    """The document that answers a question is ranked above one that does not."""
    asked = {"query": _QUESTION, "documents": [_FAR, _NEAR]}
    answer = _ask(probe, RERANK, asked)
    scores: dict[Any, float] = {}
    for item in _list(answer, "results"):
        score = item.get("relevance_score") if isinstance(item, dict) else None
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise CheckError(f"a relevance is no finite number: {short(str(item))}")
        scores[item.get("index")] = score
    if set(scores) != {0, 1}:
        raise CheckError(f"two documents were ranked as {sorted(map(str, scores))}")
    if not scores[1] > scores[0]:
        raise CheckError(
            f"the document that answers scored {scores[1]:.3f}, the other {scores[0]:.3f}"
        )
    return f"the document that answers scored {scores[1]:.3f}, the other {scores[0]:.3f}"


def classes(probe: Probe) -> str:
    """Probabilities of classes add up, and a text has the same ones whatever stands beside it."""
    first, *_ = _probabilities(probe, [_QUESTION])
    found = _probabilities(probe, [_FAR, _QUESTION])
    if len(found) != 2 or len({len(one) for one in (first, *found)}) != 1:
        raise CheckError(f"two texts got {[len(one) for one in found]} classes, one {len(first)}")
    if max(abs(a - b) for a, b in zip(first, found[1], strict=True)) > 0.02:
        raise CheckError("the same text got other classes beside another")
    if len(first) > 1 and found[0] == found[1]:
        raise CheckError("two texts about different things got the very same numbers")
    return f"{len(first)} classes, the same beside another text"


def _probabilities(probe: Probe, texts: list[str]) -> list[list[float]]:
    answer = _ask(probe, "/classify", {"input": texts})
    found = []
    for item in _list(answer, "data"):
        numbers = item.get("probs") if isinstance(item, dict) else None
        if not isinstance(numbers, list) or not numbers:
            raise CheckError("the answer has no probabilities")
        if not all(type(n) in (int, float) and 0 <= n <= 1 for n in numbers):
            raise CheckError(f"a probability is none: {short(str(numbers))}")
        if len(numbers) > 1 and abs(sum(numbers) - 1) > 0.02:
            raise CheckError(
                f"the probabilities of {len(numbers)} classes add up to {sum(numbers)}"
            )
        found.append([float(n) for n in numbers])
    return found


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
    found = answer.get(key)
    if not isinstance(found, list) or not found:
        raise CheckError(f"the answer has no {key}")
    return found


def _vector(item: Any) -> list[float]:
    numbers = item.get("embedding") if isinstance(item, dict) else None
    if not isinstance(numbers, list) or not numbers:
        raise CheckError("the answer has no embedding")
    if not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
        raise CheckError("an embedding holds what is no finite number")
    return [float(n) for n in numbers]


def _cosine(one: list[float], other: list[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    if not lengths:
        raise CheckError("an embedding is all zeros")
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths


# By the task of a model: what it is asked for, where one question has to do.
ASKED: dict[str | None, Callable[[Probe], str]] = {
    "embedding": embedding,
    "reranking": ranking,
    "classification": classes,
}
