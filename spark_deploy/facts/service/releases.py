"""Where a rollback would lead, and what no kept release needs: both asked of the host tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pyinfra.api.exceptions import FactProcessError
from spark_contract.documents import DocumentError, parse
from spark_contract.errors import Problem, problem_in
from spark_contract.host import tool
from spark_contract.serving.status import Rollback
from spark_contract.work.keep import Pruning

from spark_deploy.facts.reading import HostFact

T = TypeVar("T")
_USAGE = f"{tool.TOOL} "  # begins the list of verbs that tools print for one they do not know


def _silence() -> Problem:
    """Return what is wrong with a host that has no tools, or tools that lack the verb."""
    what = "did not answer; the host tools are missing or older than this checkout"
    return Problem("spark-host", what, "run deploy.py for this host first")


def _answer(kind: type[T], output: Iterable[str]) -> T | Problem:
    text = "\n".join(output).strip()
    if not text or text.startswith(_USAGE):
        return _silence()
    if problem := problem_in(text.rpartition("\n")[2]):
        return problem
    try:
        return parse(kind, text)
    except DocumentError as error:
        raise FactProcessError(f"{kind.__name__}: {error}") from error


class WayBack(HostFact["Rollback | Problem"]):
    """What ``spark-host rollback --dry`` says, or why it refuses."""

    default = staticmethod(_silence)

    def command(self, service: str, to: str | None) -> str:
        to_words = ("--to", to) if to else ()
        return _ask(tool.line(tool.ROLLBACK, service, *to_words, "--dry"))

    def process(self, output: Iterable[str]) -> Rollback | Problem:
        found = _answer(Rollback, output)
        return found.problem or found if isinstance(found, Rollback) else found


class Prunable(HostFact["Pruning | Problem"]):
    """What ``spark-host prune --dry`` would remove, or why it refuses; ``keep`` is its JSON."""

    default = staticmethod(_silence)

    def command(self, keep: str) -> str:
        return _ask(tool.line(tool.PRUNE, "--dry", keep))

    def process(self, output: Iterable[str]) -> Pruning | Problem:
        return _answer(Pruning, output)


def _ask(command: str) -> str:
    # Older tools print their list of verbs and fail; that is no answer, and no broken host.
    return tool.when_installed(f"{command} 2>&1 || :")
