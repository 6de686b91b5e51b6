"""Settings of a service's gateway, from ``/etc/spark/gateway/<service>.json``.

They belong to the service and not to a release: who may reach it, and under which limits, changes
without touching the engine and stays the same over a way back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from spark_contract.errors import HostToolError
from spark_contract.exposure import EXPOSURES, Expose
from spark_contract.paths import Paths


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of the certificate (with its chain) and its key, both PEM."""

    certificate: str
    key: str


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where a gateway listens and what it lets through."""

    service: str
    expose: Expose
    port: int
    max_body_bytes: int
    max_requests_per_s: int | None
    key_path: str
    tls: Tls | None
    user: str

    @property
    def unit(self) -> str:
        """The unit that runs it."""
        return f"spark-gateway@{self.service}.service"


def load(service: str, paths: Paths) -> Gateway:
    """Return the settings of a service's gateway.

    Raises:
        HostToolError: They are absent or malformed.
    """
    path = paths.gateway_settings(service)
    fix = "run the deploy for this host again"
    try:
        return _parse(json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise HostToolError(str(path), "no settings of the gateway", fix, 2) from error
    except (KeyError, TypeError, ValueError) as error:
        raise HostToolError(
            str(path), f"malformed: {type(error).__name__}: {error}", fix, 2
        ) from error


def _parse(raw: dict[str, Any]) -> Gateway:
    if raw.get("schema_version") != 1:
        raise ValueError(f"schema_version {raw.get('schema_version')!r}, known: 1")
    if raw["expose"] not in EXPOSURES:
        raise ValueError(f"expose {raw['expose']!r}, known: {', '.join(EXPOSURES)}")
    rate, tls = raw["max_requests_per_s"], raw["tls"]
    return Gateway(
        service=str(raw["service"]),
        expose=raw["expose"],
        port=int(raw["port"]),
        max_body_bytes=int(raw["max_body_bytes"]),
        max_requests_per_s=None if rate is None else int(rate),
        key_path=str(raw["key_path"]),
        tls=Tls(str(tls["certificate"]), str(tls["key"])) if tls else None,
        user=str(raw.get("user", "spark-gateway")),
    )
