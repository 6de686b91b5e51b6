"""Questions for models whose files ask none: what every model of a task answers right."""

from __future__ import annotations

from spark_deploy.config.catalog.model import Model, PlainModel, Question

# Room for a model that cannot be told not to think.
_TOKENS = 1024

_CHAT = (
    Question(
        prompt="What is the capital of France? Answer with one word.",
        expect=r"\bParis\b",
        max_tokens=_TOKENS,
    ),
    Question(
        prompt="How many days has a week? Answer with one word.",
        expect=r"(?i)\b(7|seven)\b",
        max_tokens=_TOKENS,
    ),
    Question(
        prompt="What is the capital of Japan? Answer with one word.",
        expect=r"\bTokyo\b",
        max_tokens=_TOKENS,
    ),
)

# A base model goes on with a text.
_COMPLETION = (
    Question(prompt="The capital of France is the city of", expect=r"^\W*Paris\b", max_tokens=8),
    Question(prompt="Monday, Tuesday, Wednesday, Thursday,", expect=r"^\W*Friday\b", max_tokens=8),
    Question(prompt="1, 2, 3, 4, 5, 6,", expect=r"^\W*7\b", max_tokens=8),
)
_OF_TASK = {
    "chat": _CHAT,
    "completion": _COMPLETION,
}


def questions_of(model: Model) -> tuple[Question, ...]:
    """Return what a model is asked: its own questions, else those of its task."""
    task = model.task if isinstance(model, PlainModel) else "chat"
    return model.check.questions or _OF_TASK.get(task, ())
