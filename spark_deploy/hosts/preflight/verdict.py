"""What a judgement consists of."""

from __future__ import annotations

from dataclasses import dataclass

from spark_deploy.config.errors import Problem


@dataclass(frozen=True, slots=True)
class Verdict:
    """What speaks against using the host (``problems``) and what its owner should know."""

    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...] = ()
