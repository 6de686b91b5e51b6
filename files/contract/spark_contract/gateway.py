"""Gateway settings of a service, in ``GATEWAY_DIR``; a rollback does not change them."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from spark_contract import units
from spark_contract.documents import OPTIONAL
from spark_contract.paths import GATEWAY_DIR, GATEWAY_USER

Expose = Literal["loopback", "docker", "tailscale", "lan"]


@dataclass(frozen=True, slots=True)
class Exposure:
    audience: str | None  # None means only this host
    has_unstable_address: bool  # the address may appear and disappear while the gateway runs
    needs_tls: bool  # nothing else encrypts the traffic


EXPOSURES: dict[Expose, Exposure] = {
    "loopback": Exposure(audience=None, has_unstable_address=False, needs_tls=False),
    "docker": Exposure(
        audience="containers on this host", has_unstable_address=True, needs_tls=False
    ),
    "tailscale": Exposure(audience="the tailnet", has_unstable_address=True, needs_tls=False),
    "lan": Exposure(audience="the network", has_unstable_address=False, needs_tls=True),
}


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of certificate chain and key, both PEM."""

    certificate: str
    key: str


@dataclass(frozen=True, slots=True)
class Replicas:
    """Hosts that serve the same model; the least busy host gets each request to ``port``."""

    port: int
    others: tuple[str, ...]  # address:port of the other gateways


@dataclass(frozen=True, slots=True)
class NamedKey:
    """SHA-256 and limits of a named API key; ``None`` means no limit besides those of all keys."""

    sha256: str
    max_concurrent: int | None
    max_requests_per_min: int | None
    max_body_bytes: int | None
    max_output_tokens: int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class Gateway:
    SCHEMA_VERSION: ClassVar[int] = 1

    service: str
    expose: Expose
    port: int
    max_body_bytes: int
    max_requests_per_s: int | None
    key_path: str
    tls: Tls | None
    user: str = field(default=GATEWAY_USER, metadata=OPTIONAL)
    max_connections: int | None = field(default=None, metadata=OPTIONAL)
    # Maps paths to other services on this host.
    routes: dict[str, str] = field(default_factory=dict, metadata=OPTIONAL)
    replicas: Replicas | None = field(default=None, metadata=OPTIONAL)
    # Model names of each service; requests without a model name are routed by path.
    names: dict[str, tuple[str, ...]] | None = field(default=None, metadata=OPTIONAL)
    # Maps on-demand services to the idle seconds before they stop; 0 means no limit.
    on_request: dict[str, int] | None = field(default=None, metadata=OPTIONAL)
    keys: dict[str, NamedKey] | None = field(default=None, metadata=OPTIONAL)

    @property
    def unit(self) -> str:
        return units.GATEWAY.unit(self.service)

    @property
    def path(self) -> str:
        return f"{GATEWAY_DIR}/{self.service}.json"


def tls_paths(service: str) -> Tls:
    return Tls(f"{GATEWAY_DIR}/{service}.crt", f"{GATEWAY_DIR}/{service}.key")
