"""Everything of ours on a host, asked of the host itself."""

from __future__ import annotations

from collections.abc import Iterable

from pyinfra.api.exceptions import FactProcessError
from spark_contract.documents import DocumentError, parse
from spark_contract.errors import problem_in
from spark_contract.work.keep import Ours

from spark_deploy.facts.reading import HostFact


class OursOnHost(HostFact[Ours]):
    """What ``spark-host manifest`` says; the tools that answer come with the question.

    Give them as ``_stdin``: ``payload.sent``.
    """

    def requires_command(self, command: str) -> str:
        return "python3"

    def command(self, command: str) -> str:
        return f"{command} 2>&1 || :"

    def process(self, output: Iterable[str]) -> Ours:
        """Read the answer.

        Raises:
            FactProcessError: it is none; says what the host said instead.
        """
        lines = [line for line in output if line.strip()]
        try:
            return parse(Ours, lines[-1] if lines else "")
        except DocumentError as error:
            problem = problem_in(lines[-1]) if lines else None
            told = "\n".join(lines[-3:])
            said = problem or f"{error}: {told}"
            raise FactProcessError(str(said)) from error
