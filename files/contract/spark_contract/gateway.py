"""Who reaches a service, and how: its gateway's settings, in ``GATEWAY_DIR``.

They belong to the service and not to a release: who may reach it, and under which limits, changes
without touching the engine and stays the same over a way back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from spark_contract import units
from spark_contract.documents import OPTIONAL
from spark_contract.paths import GATEWAY_DIR, GATEWAY_USER

Expose = Literal["loopback", "docker", "tailscale", "lan"]


@dataclass(frozen=True, slots=True)
class Exposure:
    """One way of being reached, beside by the host itself."""

    audience: str | None  # who else reaches it; None: nobody
    late: bool  # its address may come after the gateway has started, and go
    open: bool  # what leaves the host is encrypted by nothing but TLS


EXPOSURES: dict[Expose, Exposure] = {
    "loopback": Exposure(audience=None, late=False, open=False),
    "docker": Exposure(audience="containers of this host", late=True, open=False),
    "tailscale": Exposure(audience="the tailnet", late=True, open=False),
    "lan": Exposure(audience="the network", late=False, open=True),
}


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of the certificate (with its chain) and its key, both PEM."""

    certificate: str
    key: str


@dataclass(frozen=True, slots=True)
class Replicas:
    """Hosts that serve the same: requests at this port go to the one with the fewest under way."""

    port: int
    others: tuple[str, ...]  # address:port of their gateways


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where a gateway listens and what it lets through."""

    SCHEMA_VERSION: ClassVar[int] = 1

    service: str
    expose: Expose
    port: int
    max_body_bytes: int
    max_requests_per_s: int | None
    key_path: str
    tls: Tls | None
    user: str = field(default=GATEWAY_USER, metadata=OPTIONAL)
    # Documents of before it was counted have none.
    max_connections: int | None = field(default=None, metadata=OPTIONAL)
    # Paths that the engine of another service of this host answers: path -> service.
    routes: dict[str, str] = field(default_factory=dict, metadata=OPTIONAL)
    replicas: Replicas | None = field(default=None, metadata=OPTIONAL)
    # Of a host with several services: what clients call the models of each, this one's too. The
    # name chooses the service, the path where there is none.
    names: dict[str, tuple[str, ...]] | None = field(default=None, metadata=OPTIONAL)

    @property
    def unit(self) -> str:
        """The unit that runs it."""
        return units.GATEWAY.of(self.service)

    @property
    def path(self) -> str:
        """Where the host keeps these settings."""
        return f"{GATEWAY_DIR}/{self.service}.json"


def tls_of(service: str) -> Tls:
    """Return where a host keeps the certificate and the key of a service's gateway."""
    return Tls(f"{GATEWAY_DIR}/{service}.crt", f"{GATEWAY_DIR}/{service}.key")
