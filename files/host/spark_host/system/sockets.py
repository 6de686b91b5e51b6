"""Where a service's engine listens on this host."""

from __future__ import annotations

from pathlib import Path

from spark_contract.host.paths import Paths

from spark_host.system import folders


def engine(service: str, paths: Paths) -> Path:
    """Return the engine's socket; one started by earlier tools has it in the service's folder."""
    now, earlier = paths.engine_socket(service), paths.earlier_engine_socket(service)
    return earlier if folders.is_socket(earlier) and not folders.is_socket(now) else now
