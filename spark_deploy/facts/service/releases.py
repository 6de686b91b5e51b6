"""Where a rollback would lead, and what no kept release needs: both asked of the host tools."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any

from pyinfra.api.exceptions import FactProcessError
from pyinfra.api.facts import FactBase
from spark_contract.documents import plain
from spark_contract.errors import problem_in
from spark_contract.paths import HOST_TOOL

_USAGE = "spark-host "  # begins the list of verbs that tools print for one they do not know


class _Answer(FactBase[dict[str, Any]]):
    """One JSON object; empty when the host has no tools, or tools that lack the verb.

    What the tools refuse is the object's ``problem``, as ``{where, what, fix}``.
    """

    default = dict

    def process(self, output: Iterable[str]) -> dict[str, Any]:
        text = "\n".join(output).strip()
        if text.startswith(_USAGE):
            return {}
        last = text.rpartition("\n")[2]
        if problem := problem_in(last):
            return {"problem": plain(problem)}
        try:
            answer: dict[str, Any] = json.loads(text) if text else {}
        except ValueError as error:
            raise FactProcessError(f"{type(self).__name__}: {error}") from error
        return answer


class WayBack(_Answer):
    """What ``spark-host rollback --dry`` says."""

    def command(self, service: str, to: str | None) -> str:
        words = ["rollback", service, *(["--to", to] if to else []), "--dry"]
        return _ask(words)


class Prunable(_Answer):
    """What ``spark-host prune --dry`` would remove; ``keep`` is its JSON."""

    def command(self, keep: str) -> str:
        return _ask(["prune", "--dry", keep])


def _ask(words: list[str]) -> str:
    # Older tools print their list of verbs and fail; that is no answer, and no broken host.
    return f"if [ -x {HOST_TOOL} ]; then {HOST_TOOL} {shlex.join(words)} 2>&1 || :; fi"
