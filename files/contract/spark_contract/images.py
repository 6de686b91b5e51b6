"""Names of container images, and how hosts lend each other what one is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from spark_contract.documents import OPTIONAL
from spark_contract.fetching import Wire
from spark_contract.sharing import Peers

# What names without a host mean; this is the address behind that word.
DOCKER_HUB = "registry-1.docker.io"
# A pull that brings no new byte, or fewer than these, and no other news for so long is given up.
PULL_STALL_S = 300.0
PULL_LEAST_BYTES_PER_S = 1024
# How registries call what ``uname -m`` says.
ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}
MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)


_FIELD = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed image reference; ``version`` is a tag or a digest."""

    host: str
    name: str
    version: str

    def base_url(self, *, plain: bool) -> str:
        """Return where the repository is asked; ``plain`` is HTTP without TLS."""
        return f"{'http' if plain else 'https'}://{self.host}/v2/{self.name}"


def parse_reference(text: str) -> Reference:
    """Split ``host:port/name:tag@digest`` by the rules of the container engine."""
    rest, _, digest = text.partition("@")
    first, slash, tail = rest.partition("/")
    has_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
    host, rest = (first, tail) if has_host else (DOCKER_HUB, rest)
    name, _, tag = rest.partition(":")
    if host == DOCKER_HUB and "/" not in name:
        name = f"library/{name}"
    return Reference(host, name, digest or tag or "latest")


def token_question(challenge: str, schemes: Iterable[str]) -> tuple[str, dict[str, str]] | None:
    """Return where the header of an answer 401 says that anybody gets a token, and what to ask.

    That is the distribution token specification. Where a registry is asked over https, its token
    comes over https, too.
    """
    fields = dict(_FIELD.findall(challenge))
    realm = fields.pop("realm", "")
    known = challenge.startswith("Bearer ") and realm.startswith(tuple(f"{s}://" for s in schemes))
    return (realm, fields) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersPlan(Wire):
    """``layers.json``: an image's blobs as a tree, fetched like any tree and pulled from there.

    They are those of the registry, byte for byte: what an image store gives back has other
    digests on another store.
    """

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str  # of the tree
    reference: str  # name@sha256:...
    plain: bool  # the registry speaks HTTP without TLS
    out: str
    keep: bool = field(default=False, metadata=OPTIONAL)  # for hosts that come later
    peers: Peers | None = field(default=None, metadata=OPTIONAL)
