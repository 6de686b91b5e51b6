"""Families of models: ``catalog/families.yml``, declared."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spark_deploy.documents.declare import needed, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names of parsers that no file of a repository says."""

    model_types: tuple[str, ...] = needed("model_type of config.json.", minItems=1)
    name: str = setting("", "Regular expression found in the repository's name; empty fits all.")
    reasoning: str | None = setting(None, "Reasoning parser of the engine; null for none.")
    tool_call: str | None = setting(None, "Tool call parser of the engine; null for none.")
    source: str = needed("Where this is known from.", minLength=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Families:
    """Families in the order in which they are tried."""

    families: tuple[Family, ...] = needed("The first that fits counts.")

    def of(self, model_type: str, repository: str) -> Family | None:
        """Return the family of a repository; ``None``: it is not known."""
        return next(
            (
                one
                for one in self.families
                if model_type in one.model_types and re.search(one.name, repository)
            ),
            None,
        )
