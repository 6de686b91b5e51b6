"""Questions for models whose files ask none: what every model of a task answers right."""

from __future__ import annotations

from spark_deploy.catalog.model import Model, ModelCheck, Question

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


def questions_of(model: Model) -> tuple[Question, ...]:
    """Return what a model is asked: its own questions, else those of its kind."""
    check: ModelCheck = model.check
    return check.questions or _CHAT
