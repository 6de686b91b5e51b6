"""Settings of registries, model hub, downloads, peers, proxy and package repositories."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from spark_contract.units import SHA256

from spark_deploy.config.documents import CLOSED, MIB, UNIQUE, FromKey, text_schema
from spark_deploy.config.settings.patterns import (
    Component,
    Glob,
    IpAddress,
    SecretRef,
    Suite,
    Url,
    text_field,
)

REPOSITORY_NAME = text_schema(
    "^[a-z0-9][a-z0-9._-]*$", "a name of lowercase letters, digits and . _ -", "docker-ubuntu"
)

_HostAndPort = Annotated[
    str, text_field(r"^[A-Za-z0-9][A-Za-z0-9.-]*:[0-9]+$", "HOST:PORT", "192.168.1.10:5000")
]
# In an environment file of systemd and docker: no quote, backslash, $ or %.
_DIRECT = r"^[A-Za-z0-9._*:/\[\]-]+$"
_Direct = Annotated[str, text_field(_DIRECT, "a host or network", "192.168.1.0/24")]
_Sha256 = Annotated[
    str, text_field(f"^{SHA256}$", "the 64 hexadecimal digits that `sha256sum` prints", "0" * 64)
]


@dataclass(frozen=True, slots=True, config=CLOSED)
class RegistrySettings:
    """How image registries are reached."""

    insecure: tuple[_HostAndPort, ...] = Field(
        default=(), examples=[["192.168.1.10:5000"]], json_schema_extra=UNIQUE
    )
    """Registries that are reached over plain HTTP, as host:port."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class HubSettings:
    """Where model repositories come from."""

    endpoint: Url = "https://huggingface.co"
    """Base URL of the hub, without a slash at the end."""
    mirrors: tuple[Url, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """Base URLs to try before the endpoint. Hosts verify the hashes of downloads."""
    token: SecretRef | None = None
    """Where the controller reads a token for gated repositories: {env: NAME}, {file: PATH} or
    {command: [PROGRAM, ARGUMENT]}; null: your Hugging Face login (HF_TOKEN or `hf auth login`),
    if it belongs to hub.endpoint."""


# Without a login, which everyone who reads the settings would see.
_PROXY = r"^https?://[^@\s/]+/?$"
_ProxyAddress = Annotated[
    str, text_field(_PROXY, "http://HOST:PORT without a login", "http://proxy.example:3128")
]


@dataclass(frozen=True, slots=True, config=CLOSED)
class ProxySettings:
    """HTTP proxy for downloads and image pulls. For packages, configure apt on the host."""

    url: _ProxyAddress | SecretRef | None = Field(
        default=None, examples=["http://proxy.example.org:3128"]
    )
    """http://HOST:PORT if the proxy needs no login; otherwise where the controller reads a URL
    with a login: {env: NAME}, {file: PATH} or {command: [PROGRAM, ARGUMENT]}; null: no proxy."""
    direct: tuple[_Direct, ...] = Field(
        default=("localhost", "127.0.0.1", "::1"), json_schema_extra=UNIQUE
    )
    """Names, domains and addresses to reach without the proxy (no_proxy)."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class DownloadSettings:
    """How hosts download model files."""

    rate_limit_mib_per_s: float | None = Field(default=None, gt=0)
    """Maximum MiB per second per host; null: unlimited."""
    outage_s: float = Field(default=6 * 3600.0, ge=0, le=7 * 86400)
    """Seconds without a new byte during which jobs retry the hub. 0: a download fails after two
    attempts without a new byte, and the next run resumes it."""
    look_in: tuple[Glob, ...] = Field(
        default=(
            "/srv/spark/sources",
            "/root/.cache/huggingface/hub",
            "/home/*/.cache/huggingface/hub",
        ),
        json_schema_extra=UNIQUE,
    )
    """Folders on the host (shell globs) with existing model files. Files that only root can write
    are linked, the rest copied."""

    @property
    def tries(self) -> int:
        return 8 if self.outage_s else 2

    @property
    def rate_limit_bytes_per_s(self) -> int | None:
        return round(self.rate_limit_mib_per_s * MIB) if self.rate_limit_mib_per_s else None


@dataclass(frozen=True, slots=True, config=CLOSED)
class FleetSettings:
    """Peer downloads between the hosts of a run."""

    share: bool = True
    """Hosts in the same run copy model files and images from each other, over plain HTTP with a key
    that is valid until the run ends."""
    address: IpAddress | None = Field(default=None, examples=["192.168.100.11"])
    """Address of this host for peer downloads, and for replicas with `expose: lan`; best in the
    fastest network. null: the login address, and for replicas the address for clients."""


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class RepositorySettings:
    """A signed apt repository."""

    name: FromKey
    url: Url = Field(description="Base URL.")
    suite: Suite = Field(description="Suite, or ./ for a flat repository.")
    components: tuple[Component, ...] = Field(json_schema_extra=UNIQUE)
    """Components; empty for a flat repository."""
    key_url: Url = Field(description="URL of the signing key.")
    key_sha256: _Sha256
    """sha256 of the key file."""
