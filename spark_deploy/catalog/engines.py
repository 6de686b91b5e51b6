"""Engines: what each supported version of vLLM lists, ``catalog/engines.yml``, declared."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spark_deploy.documents.declare import needed

CALLED = "vLLM"
_VERSION = re.compile(r"v?(0\.\d+\.\d+)(?![\d.])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One version of the engine."""

    source: str = needed("Wheel and file that the names are from.")
    generates: tuple[str, ...] = needed("Architectures that answer with text.")
    pools: tuple[str, ...] = needed("Architectures that answer with numbers.")
    tool_call: tuple[str, ...] = needed("Its parsers of tool calls.")
    reasoning: tuple[str, ...] = needed("Its parsers of reasoning.")

    def lists(self, architecture: str) -> bool:
        """Whether the engine has a class for an architecture."""
        return architecture in self.generates or architecture in self.pools


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Architectures and parsers of each supported engine; written from its sources by a test."""

    engines: dict[str, Engine] = needed("By version.")

    def of_image(self, reference: str) -> tuple[str, Engine | None]:
        """Return the version that an image's tag tells, and what is known of it."""
        version = version_of(reference)
        return version, self.engines.get(version)


def version_of(reference: str) -> str:
    """Return N of an image called ``...:vN``; empty when its tag tells no version of vLLM."""
    tag = reference.partition("@")[0].rpartition("/")[2].partition(":")[2]
    found = _VERSION.match(tag)
    return found[1] if found else ""
