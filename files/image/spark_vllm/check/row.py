"""One row of the table: a symbol of vLLM, what we demand of it, why, and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spark_vllm import SUPPORTED_ENGINES
from spark_vllm.check.rules import Rule
from spark_vllm.check.sources import MissingError, Sources


@dataclass(frozen=True)
class Row:
    """One thing we rely on."""

    symbol: str  # "module:name.inner"
    rule: Rule
    why: str
    used_by: str  # file of ours
    versions: tuple[str, ...] = SUPPORTED_ENGINES

    def problems(self, sources: Sources) -> Iterator[str]:
        """Yield one line for each thing that changed."""
        try:
            yield from map(self.told, self.rule.problems(sources, self.symbol))
        except MissingError as error:
            yield self.told(str(error))

    def told(self, problem: str) -> str:
        """Return ``problem`` with the symbol, and why and where we need it."""
        return f"{self.symbol}: {problem}\n  we rely on it: {self.why}\n  in: {self.used_by}"
