"""Documents of the fetcher: downloads, peers and image layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import ClassVar

from spark_contract.documents import OPTIONAL, DocumentError, in_range, of_form, plain_directory
from spark_contract.paths import CONFIG_DIR, RECEIPT_NAME
from spark_contract.units import COMMIT, SHA256

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How patiently and how widely the network is used."""

    tries: int = 8  # attempts without progress, then the next source or the end
    # The hub itself is asked for at least so long without a new byte: lines break for hours.
    outage_s: float = field(default=0.0, metadata=OPTIONAL)
    backoff_s: float = 1.0  # before the second try; doubles up to 30
    # Sent to the hub's own host only: not to peers and mirrors, not to where the hub redirects.
    token_file: str | None = field(default=None, metadata=OPTIONAL)
    parallel: int = field(default=4, metadata=OPTIONAL)  # requests at once
    timeout_s: float = field(default=30.0, metadata=OPTIONAL)  # a connection may stay silent
    rate_limit_bytes_per_s: int | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        """Refuse what no network can be used with."""
        in_range("tries", self.tries, 1, 100)
        in_range("parallel", self.parallel, 1, 64)
        in_range("backoff_s", self.backoff_s, 0)
        in_range("outage_s", self.outage_s, 0)
        in_range("timeout_s", self.timeout_s, 0.1)
        in_range("rate_limit_bytes_per_s", self.rate_limit_bytes_per_s or 1, 1)


@dataclass(frozen=True, slots=True)
class FetchFile:
    """One file to fetch; at least one of the hashes is set."""

    path: str  # relative, with forward slashes
    size_bytes: int
    sha256: str | None = field(default=None, metadata=OPTIONAL)
    git_sha1: str | None = field(default=None, metadata=OPTIONAL)  # of a blob: all small files have

    def __post_init__(self) -> None:
        """Refuse a file that is outside of its tree or cannot be proven."""
        if not is_inside(self.path):
            raise DocumentError(f"files: path {self.path!r} leaves the tree")
        if self.path == RECEIPT_NAME or self.path.endswith(".part"):
            raise DocumentError(f"files: path {self.path!r} is taken")
        if self.sha256 is None and self.git_sha1 is None:
            raise DocumentError(f"files: {self.path}: sha256 is missing, and git_sha1 as well")
        of_form(f"files: {self.path}: sha256", self.sha256, SHA256)
        of_form(f"files: {self.path}: git_sha1", self.git_sha1, COMMIT)
        in_range(f"files: {self.path}: size_bytes", self.size_bytes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan(Wire):
    """``fetch.json``: one repository at one commit, and every place its bytes may come from."""

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str  # of the tree, made by the controller
    name: str  # org/repo
    commit: str
    out: str  # appears complete or not at all
    files: tuple[FetchFile, ...]
    urls: tuple[str, ...]  # a file's path is appended; mirrors first, the hub last
    peers: Peers | None = field(default=None, metadata=OPTIONAL)  # asked before all of these
    pieces: bool  # hash every 4 MiB too, so that a build in layout full reads each byte once
    look_in: tuple[str, ...]  # globs of directories on this host, searched before any download
    token_file: str | None
    parallel: int  # files at once
    rate_limit_bytes_per_s: int | None  # of all downloads together

    def __post_init__(self) -> None:
        """Refuse an order that cannot be followed."""
        Wire.__post_init__(self)
        of_form("digest", self.digest, SHA256)
        of_form("commit", self.commit, COMMIT)
        of_form("name", self.name, ".+")
        plain_directory("out", self.out)
        for url in self.urls:
            of_form("urls", url, "https?://.+")
        paths = [file.path for file in self.files]
        twice = next((path for path in paths if paths.count(path) > 1), None)
        if twice is not None:
            raise DocumentError(f"files: path {twice!r} is taken")
        if not paths or not (self.urls or self.look_in):
            raise DocumentError("urls: names no source" if paths else "files: names no file")

    @property
    def out_dir(self) -> Path:
        """The directory to make."""
        return Path(self.out)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tree."""
        return sum(file.size_bytes for file in self.files)


def is_inside(path: str) -> bool:
    """Return whether a relative path stays in its tree, and is written the plain way."""
    relative = PurePosixPath(path)
    parts = relative.parts
    return bool(parts) and not relative.is_absolute() and ".." not in parts and "\0" not in path \
        and str(relative) == path  # fmt: skip


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
