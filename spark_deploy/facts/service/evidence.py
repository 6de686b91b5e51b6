"""What a host shows of its engine beyond its status: one JSON object from the host tools."""

from __future__ import annotations

import json
from collections.abc import Iterable

from spark_contract.documents import DocumentError, read
from spark_contract.host import tool
from spark_contract.serving import status

from spark_deploy.facts.reading import HostFact


class Evidence(HostFact["status.Evidence | None"]):
    """``spark-host evidence``; ``None`` where the tools are not there, or know no such verb."""

    @staticmethod
    def default() -> status.Evidence | None:
        """Return what a host without our tools has to say."""
        return None

    def command(self) -> str:
        return tool.when_installed(f"{tool.line(tool.EVIDENCE)} || true")

    def process(self, output: Iterable[str]) -> status.Evidence | None:
        try:
            return read(status.Evidence, json.loads("\n".join(output)))
        except (ValueError, DocumentError):
            return None
