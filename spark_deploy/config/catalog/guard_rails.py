"""Guard rails (``catalog/guard_rails.yml``) and open questions (``catalog/open_questions.yml``)."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from spark_deploy.config.documents import CLOSED, Schema
from spark_deploy.config.settings.patterns import RailName

_COMPARISONS = {
    "is": {"description": "Equal to this value."},
    "starts_with": {"description": "Starts with this text.", "type": "string"},
    "above": {"description": "Greater than this number.", "type": "number"},
    "below": {"description": "Less than this number.", "type": "number"},
    "below_fact": {"description": "Less than another fact.", "type": "string"},
    "one_of": {"description": "Equal to any of these values.", "type": "array", "minItems": 1},
    "listed": {
        "description": "Whether a list has items; the message lists the items.",
        "type": "boolean",
    },
    "contains": {"description": "Contains this lowercase text.", "type": "string"},
}
COMPARISON: Schema = {
    "description": "One comparison.",
    "type": "object",
    "additionalProperties": False,
    "minProperties": 1,
    "maxProperties": 1,
    "properties": _COMPARISONS,
}


def all_hold(conditions: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> bool:
    return all(_holds(facts[fact], condition, facts) for fact, condition in conditions.items())


def _holds(value: Any, comparison: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Return whether a value satisfies a comparison, such as ``{"above": 2}``."""
    [(operator, other)] = comparison.items()
    if operator == "is":
        return bool(value == other)
    if operator == "one_of":
        return value in other
    if operator == "listed":
        return bool(value) is bool(other)
    if operator == "starts_with":
        return str(value).startswith(str(other))
    if operator == "contains":
        return str(other) in str(value)
    if operator == "above":
        return bool(value > other)
    if operator == "below":
        return bool(value < other)
    return bool(value < facts[other])  # below_fact


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class GuardRail:
    """A combination of settings that is known to fail."""

    rule: RailName = Field(description="Short name.")
    applies: dict[str, dict[str, Any]] = Field(
        min_length=1, json_schema_extra={"additionalProperties": COMPARISON}
    )
    """Conditions on facts of the planned release; all must be true."""
    effect: Literal["refuse", "warn"] = Field(
        description="refuse: reject the plan; warn: print a warning."
    )
    reason: str = Field(description="Consequence, in a sentence.")
    fix: str = Field(description="The alternative.")
    evidence: Literal["measured", "read", "reported"]
    """measured: in our result files; read: in source code; reported: by other users."""
    source: str = Field(description="Source of this knowledge.")
    may_be_overridden: bool = False
    """Whether a host's `override_rails` may turn the rejection into a warning."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class GuardRails:
    """Combinations of settings that are known to fail."""

    rails: tuple[GuardRail, ...] = Field(description="The rules.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Question:
    """A question with a checkable answer."""

    id: str = Field(json_schema_extra={"pattern": "^[a-z-]+$"})
    """Name of the question, and of the function that answers it."""
    question: str = Field(min_length=1, description="The question, in a sentence.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Part:
    """A part of the project, with evidence and open questions."""

    part: str = Field(min_length=1, description="Name of the part.")
    lab: str = Field(description="Evidence from the virtual lab.")
    gpu: str = Field(description="Evidence from GPUs other than a Spark's.")
    questions: tuple[Question, ...] = Field(min_length=1, description="Open questions.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class OpenQuestions:
    """Evidence and open questions of all parts."""

    parts: tuple[Part, ...] = Field(
        min_length=1, description="Parts, in the order they appear on the page."
    )

    @property
    def all(self) -> tuple[Question, ...]:
        return tuple(question for part in self.parts for question in part.questions)
