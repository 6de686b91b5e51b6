"""Where a rollback would lead, and what no kept release needs: both asked of the host tools."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any

from pyinfra.api.exceptions import FactProcessError
from pyinfra.api.facts import FactBase

_USAGE = "spark-host "  # begins the list of verbs that tools print for one they do not know


def problem_in(line: str) -> dict[str, str]:
    """Take an error line of the host tools apart: ``error: where: what; fix: fix``."""
    text, _, fix = line.removeprefix("error: ").partition("; fix: ")
    where, _, what = text.partition(": ")
    return {"where": where, "what": what, "fix": fix or "see above, then run again"}


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
        if last.startswith("error: "):
            return {"problem": problem_in(last)}
        try:
            answer: dict[str, Any] = json.loads(text) if text else {}
        except ValueError as error:
            raise FactProcessError(f"{type(self).__name__}: {error}") from error
        return answer


class WayBack(_Answer):
    """What ``spark-host rollback --dry`` says."""

    def command(self, tools_dir: str, service: str, to: str | None) -> str:
        words = ["rollback", service, *(["--to", to] if to else []), "--dry"]
        return _ask(tools_dir, words)


class Prunable(_Answer):
    """What ``spark-host prune --dry`` would remove; ``keep`` is its JSON."""

    def command(self, tools_dir: str, keep: str) -> str:
        return _ask(tools_dir, ["prune", "--dry", keep])


def _ask(tools_dir: str, words: list[str]) -> str:
    tool = shlex.quote(f"{tools_dir}/current/bin/spark-host")
    # Older tools print their list of verbs and fail; that is no answer, and no broken host.
    return f"if [ -x {tool} ]; then {tool} {shlex.join(words)} 2>&1 || :; fi"
