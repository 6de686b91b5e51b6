"""Settings of where things come from: registries, model hub, downloads, package repositories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic.json_schema import SkipJsonSchema
from spark_contract.units import SHA256

from spark_deploy.config.documents.declare import Mib, about, form, needed, of_key, setting
from spark_deploy.config.settings.rules import COMPONENT, GLOB, IP_ADDRESS, SUITE, URL
from spark_deploy.config.settings.secrets import SecretRef

REPOSITORY_NAME = form(
    "^[a-z0-9][a-z0-9._-]*$", "a name of small letters, digits and . _ -", "docker-ubuntu"
)

_HOST_AND_PORT = form(r"^[A-Za-z0-9][A-Za-z0-9.-]*:[0-9]+$", "HOST:PORT", "192.168.1.10:5000")
_DIRECT = form(r"^[^\s,]+$", "one host or network an entry", "192.168.1.0/24")
_SHA256 = form(f"^{SHA256}$", "the 64 hexadecimal digits that `sha256sum` prints", "0" * 64)

RepositoryNames = tuple[Annotated[str, about(**REPOSITORY_NAME)], ...]


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """How image registries are reached."""

    insecure: tuple[Annotated[str, about(**_HOST_AND_PORT)], ...] = setting(
        (),
        "Registries spoken to over plain HTTP, as host:port.",
        uniqueItems=True,
        examples=[["192.168.1.10:5000"]],
    )


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Where model repositories come from."""

    endpoint: str = setting(
        "https://huggingface.co",
        "Base URL of the hub, without a slash at the end.",
        **URL,
    )
    mirrors: tuple[Annotated[str, about(**URL)], ...] = setting(
        (),
        "Base URLs tried before the endpoint; they serve the same paths, hashes decide.",
        uniqueItems=True,
    )
    token: SecretRef | None = setting(
        None,
        "Where the controller reads a token for gated repositories: {env: NAME}, {file: PATH} or "
        "{command: [PROGRAM, ARGUMENT]}; null: your Hugging Face login (HF_TOKEN or "
        "`hf auth login`), where hub.endpoint is its hub.",
    )


# A login in it would be read by everybody who reads the settings.
_PROXY = form(
    r"^https?://[^@\s/]+/?$", "http://HOST:PORT without a login", "http://proxy.example:3128"
)
_ProxyUrl = Annotated[str, about(**_PROXY)] | SecretRef | None
_PROXY_MEANING = (
    "Proxy for {0} addresses: http://HOST:PORT without a login, or where the controller reads "
    "one with a login: {{env: NAME}}, {{file: PATH}} or {{command: [PROGRAM, ARGUMENT]}}; null for "
    "none."
)


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """The way out of hosts that have no other: downloads of jobs, and image pulls.

    Packages come the way that apt was told by the host's owner.
    """

    http: _ProxyUrl = setting(None, _PROXY_MEANING.format("http"))
    https: _ProxyUrl = setting(
        None, _PROXY_MEANING.format("https"), examples=["http://proxy.example.org:3128"]
    )
    direct: tuple[Annotated[str, about(**_DIRECT)], ...] = setting(
        ("localhost", "127.0.0.1", "::1"),
        "Names, domains and addresses that are reached without the proxy (no_proxy).",
        uniqueItems=True,
    )

    @property
    def used(self) -> bool:
        """Whether there is a proxy at all."""
        return self.http is not None or self.https is not None


@dataclass(frozen=True, slots=True)
class DownloadSettings:
    """How hosts fetch model files."""

    parallel: int = setting(4, "Files fetched at the same time.", minimum=1, maximum=64)
    rate_limit_bytes_per_s: Mib | None = setting(
        None,
        "Highest rate of one host in MiB per second; null for none.",
        key="rate_limit_mib_per_s",
        exclusiveMinimum=0,
    )
    tries: int = setting(
        8,
        "Attempts without a new byte before a download, or a build that reads from the hub, gives "
        "up a mirror, and after outage_s the hub; the next run goes on from there.",
        minimum=1,
        maximum=100,
    )
    retry_pause_s: float = setting(
        1.0,
        "Seconds before the second attempt; the pause doubles each time, up to 30 (8 attempts: "
        "about a minute).",
        minimum=0,
        maximum=30,
    )
    outage_s: float = setting(
        6 * 3600.0,
        "Seconds without a new byte that jobs keep asking the hub, every 30 seconds at most: a "
        "line that is broken for hours costs these hours and nothing else. 0: only tries counts.",
        minimum=0,
        maximum=7 * 86400,
    )
    look_in: tuple[Annotated[str, about(**GLOB)], ...] = setting(
        ("/srv/spark/sources", "/root/.cache/huggingface/hub", "/home/*/.cache/huggingface/hub"),
        "Folders on the host (shell globs) that may hold the bytes already; files that "
        "only root can write to are linked, others copied, none is moved.",
        uniqueItems=True,
    )


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """How the hosts of one run lend each other what they have fetched."""

    share: bool = setting(
        True,
        "While a host of a run lacks files of a model, or an image, that another one has or "
        "fetches, they are lent: hub and registry send them once. Read-only, over plain HTTP with "
        "a key of the run, and closed when the run ends.",
    )
    address: str | None = setting(
        None,
        "Address of this host at which the others fetch from it, best on the fastest network. "
        "null: the one that it was logged in at.",
        **IP_ADDRESS,
        examples=["192.168.100.11"],
    )
    port: int = setting(8010, "Port at which it lends.", minimum=1024, maximum=65535)


@dataclass(frozen=True, slots=True)
class RepositorySettings:
    """One signed apt repository."""

    name: SkipJsonSchema[str] = of_key()
    url: str = needed("Base URL.", **URL)
    suite: str = needed("Suite, or ./ for a flat repository.", **SUITE)
    components: tuple[Annotated[str, about(**COMPONENT)], ...] = needed(
        "Components; empty for a flat repository.", uniqueItems=True
    )
    key_url: str = needed("Where the signing key lies.", **URL)
    key_sha256: str = needed(
        "sha256 of the key file's content; anything else is refused.", **_SHA256
    )
