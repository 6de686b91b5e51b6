"""Who reaches a service, and how: its gateway's settings, in ``GATEWAY_DIR``; what hosts lend.

They belong to the service and not to a release: who may reach it, and under which limits, changes
without touching the engine and stays the same over a way back.

While a deploy needs it, hosts lend each other files of trees, whole or being fetched. What a peer
sends is proven like what a hub sends: by the hashes in the order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from spark_contract import units
from spark_contract.documents import OPTIONAL
from spark_contract.paths import CONFIG_DIR, GATEWAY_DIR

# Made by files/units/spark-sysusers.conf.
GATEWAY_USER = "spark-gateway"
ENGINE_USER = "spark-engine"
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


SHARE_SETTINGS = f"{CONFIG_DIR}/share.json"
SHARE_KEY = f"{CONFIG_DIR}/share-key"  # 0600; there while the host lends


@dataclass(frozen=True, slots=True)
class SharedTree:
    """A tree whose files peers may read."""

    digest: str  # of the tree: what a receipt carries
    dir: str
    job: str  # twelve digits of the job that makes it: peers look whether it gets on
    # Files of a tree being fetched have their names once they are proven, those of a build do not.
    unfinished: bool


@dataclass(frozen=True, slots=True)
class Share:
    """Where a host lends, and what."""

    SCHEMA_VERSION: ClassVar[int] = 1

    address: str
    port: int
    trees: tuple[SharedTree, ...]


@dataclass(frozen=True, slots=True)
class Peers:
    """Where else the files of one tree may be."""

    urls: tuple[str, ...]  # of hosts, without what of_tree adds; in the order to ask in
    key_file: str = field(default=SHARE_KEY, metadata=OPTIONAL)
    # So long one may stand still before it is left for the hub, or before it begins.
    patience_s: float = field(default=30.0, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class FinishedTree:
    """A tree that a peer has whole; its receipt was read over another way than the tree will be."""

    url: str  # of the host
    receipt_sha256: str


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """``copy.json``: where a tree that could be built is there already."""

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str  # of the tree
    trees: tuple[FinishedTree, ...]  # in the order to ask in
    key_file: str = field(default=SHARE_KEY, metadata=OPTIONAL)


def of_tree(url: str, digest: str) -> str:
    """Return the address of a tree at a peer: below it ``files/PATH`` and ``progress``."""
    return f"{url.rstrip('/')}/{digest}"


def growing_dir(out: Path) -> Path:
    """Return where the work on a tree lies before it is whole; the same on every try."""
    return out.parent / f".{out.name}.partial"


def growing_tree(out: Path) -> Path:
    """Return where a tree grows before it is renamed to ``out``."""
    return growing_dir(out) / "tree"
