"""What is proven and what only a Spark can tell: ``catalog/open_questions.yml``, declared."""

from __future__ import annotations

from dataclasses import dataclass

from spark_deploy.documents.declare import needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Something that only a DGX Spark can tell."""

    id: str = needed("Its name; the function of this name answers it.", pattern="^[a-z-]+$")
    question: str = needed("The question, in a sentence.", minLength=1)
    how: str = needed("How the host answers it.", minLength=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the project, and what showed that it works."""

    part: str = needed("What it is.", minLength=1)
    lab: str = needed("What the virtual lab showed.")
    gpu: str = needed("What GPUs that are not a Spark's showed.")
    questions: tuple[Question, ...] = needed("What is open.", minItems=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenQuestions:
    """What is proven, where, and what is open."""

    parts: tuple[Part, ...] = needed("In the order of the page.", minItems=1)

    @property
    def all(self) -> tuple[Question, ...]:
        """Every question, in the order of the page."""
        return tuple(one for part in self.parts for one in part.questions)
