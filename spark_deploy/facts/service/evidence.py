"""What a host shows of its engine beyond its status: one JSON object from the host tools."""

from __future__ import annotations

import json
from collections.abc import Iterable

from spark_contract import evidence
from spark_contract.documents import DocumentError, read
from spark_contract.paths import HOST_TOOL

from spark_deploy.facts.reading import HostFact


class Evidence(HostFact["evidence.Evidence | None"]):
    """``spark-host evidence``; ``None`` where the tools are not there, or know no such verb."""

    @staticmethod
    def default() -> evidence.Evidence | None:
        """Return what a host without our tools has to say."""
        return None

    def command(self) -> str:
        return f"if [ -x {HOST_TOOL} ]; then {HOST_TOOL} evidence || true; fi"

    def process(self, output: Iterable[str]) -> evidence.Evidence | None:
        try:
            return read(evidence.Evidence, json.loads("\n".join(output)))
        except (ValueError, DocumentError):
            return None
