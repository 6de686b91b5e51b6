"""Documents of the fetcher: downloads, peer downloads and image layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import ClassVar

from spark_contract.documents import (
    OPTIONAL,
    DocumentError,
    check_pattern,
    check_plain_directory,
    check_range,
)
from spark_contract.paths import CONFIG_DIR, RECEIPT_NAME
from spark_contract.units import COMMIT, SHA256

SHARE_SETTINGS = f"{CONFIG_DIR}/share.json"
SHARE_KEY = f"{CONFIG_DIR}/share-key"  # 0600; exists while the host shares files


@dataclass(frozen=True, slots=True)
class SharedTree:
    """A checkpoint that peers may read and verify."""

    digest: str  # as in the receipt
    dir: str
    job: str  # digest12 of the job; peers query the progress
    # A download names each file once it is verified; a build only at the end.
    unfinished: bool


@dataclass(frozen=True, slots=True)
class Share:
    SCHEMA_VERSION: ClassVar[int] = 1

    address: str
    port: int
    trees: tuple[SharedTree, ...]


@dataclass(frozen=True, slots=True)
class Peers:
    urls: tuple[str, ...]  # of hosts, see tree_url; in order of preference
    key_file: str = field(default=SHARE_KEY, metadata=OPTIONAL)
    # without progress
    patience_s: float = field(default=30.0, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class FinishedTree:
    """A complete tree at a peer; the receipt was read through SSH."""

    url: str  # of the host
    receipt_sha256: str


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """``copy.json``: peers that already built a tree."""

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str  # of the tree
    trees: tuple[FinishedTree, ...]  # in order of preference
    key_file: str = field(default=SHARE_KEY, metadata=OPTIONAL)


def tree_url(url: str, digest: str) -> str:
    return f"{url.rstrip('/')}/{digest}"


def partial_dir(out: Path) -> Path:
    """Return the work directory of a tree, which the next attempt continues."""
    return out.parent / f".{out.name}.partial"


def partial_tree(out: Path) -> Path:
    return partial_dir(out) / "tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    tries: int = 8  # attempts without progress for each source
    # Retry the hub at least so long: lines break for hours.
    outage_s: float = field(default=0.0, metadata=OPTIONAL)
    backoff_s: float = 1.0  # before the second try; doubles up to 30
    # Never sent to peers, mirrors or redirect targets.
    token_file: str | None = field(default=None, metadata=OPTIONAL)
    parallel: int = field(default=4, metadata=OPTIONAL)  # requests at once
    timeout_s: float = field(default=30.0, metadata=OPTIONAL)  # without data on a connection
    rate_limit_bytes_per_s: int | None = field(default=None, metadata=OPTIONAL)
    # A mirror or peer with a lower rate, all requests together, is left for the next source.
    slow_bytes_per_s: int = field(default=1_000_000, metadata=OPTIONAL)
    slow_after_s: float = field(default=10.0, metadata=OPTIONAL)  # measured over so long

    def __post_init__(self) -> None:
        check_range("tries", self.tries, 1, 100)
        check_range("parallel", self.parallel, 1, 64)
        check_range("backoff_s", self.backoff_s, 0)
        check_range("outage_s", self.outage_s, 0)
        check_range("timeout_s", self.timeout_s, 0.1)
        check_range("rate_limit_bytes_per_s", self.rate_limit_bytes_per_s or 1, 1)
        check_range("slow_bytes_per_s", self.slow_bytes_per_s, 0)
        check_range("slow_after_s", self.slow_after_s, 0.1)

    @property
    def min_bytes_per_s(self) -> float:
        """The rate below which a mirror or peer counts as slow.

        With a low rate limit of our own it is half of that limit.
        """
        if self.rate_limit_bytes_per_s is None:
            return self.slow_bytes_per_s
        return min(self.slow_bytes_per_s, self.rate_limit_bytes_per_s / 2)


@dataclass(frozen=True, slots=True)
class FetchFile:
    path: str  # relative, with forward slashes
    size_bytes: int
    sha256: str | None = field(default=None, metadata=OPTIONAL)
    git_sha1: str | None = field(default=None, metadata=OPTIONAL)  # of the blob, if small

    def __post_init__(self) -> None:
        if not is_inside(self.path):
            raise DocumentError(f"files: path {self.path!r} escapes the tree")
        if self.path == RECEIPT_NAME or self.path.endswith(".part"):
            raise DocumentError(f"files: path {self.path!r} is reserved")
        if self.sha256 is None and self.git_sha1 is None:
            raise DocumentError(f"files: {self.path}: sha256 and git_sha1 are missing")
        check_pattern(f"files: {self.path}: sha256", self.sha256, SHA256)
        check_pattern(f"files: {self.path}: git_sha1", self.git_sha1, COMMIT)
        check_range(f"files: {self.path}: size_bytes", self.size_bytes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan(TransferOptions):
    """``fetch.json``: a repository at a commit, and sources."""

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str
    name: str
    commit: str
    out: str  # created atomically
    files: tuple[FetchFile, ...]
    urls: tuple[str, ...]  # a file's path is appended; mirrors first, the hub last
    peers: Peers | None = field(default=None, metadata=OPTIONAL)  # preferred over urls
    pieces: bool  # also hash every 4 MiB
    look_in: tuple[str, ...]  # local directories to search first (globs)
    token_file: str | None
    parallel: int
    rate_limit_bytes_per_s: int | None  # total

    def __post_init__(self) -> None:
        TransferOptions.__post_init__(self)
        check_pattern("digest", self.digest, SHA256)
        check_pattern("commit", self.commit, COMMIT)
        check_pattern("name", self.name, ".+")
        check_plain_directory("out", self.out)
        for url in self.urls:
            check_pattern("urls", url, "https?://.+")
        paths = [file.path for file in self.files]
        twice = next((path for path in paths if paths.count(path) > 1), None)
        if twice is not None:
            raise DocumentError(f"files: path {twice!r} occurs twice")
        if not paths or not (self.urls or self.look_in):
            raise DocumentError("urls: empty" if paths else "files: empty")

    @property
    def out_dir(self) -> Path:
        return Path(self.out)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def is_inside(path: str) -> bool:
    """Return whether a path is relative, normalised and inside the tree."""
    relative = PurePosixPath(path)
    is_below = bool(relative.parts) and not relative.is_absolute() and ".." not in relative.parts
    return is_below and "\0" not in path and str(relative) == path


DOCKER_HUB = "registry-1.docker.io"
# Cancel a pull below this rate for so long.
PULL_STALL_S = 300.0
PULL_MIN_BYTES_PER_S = 1024
# ``uname -m`` -> name in registries.
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
    host: str
    name: str
    version: str

    def base_url(self, *, plain: bool) -> str:
        return f"{'http' if plain else 'https'}://{self.host}/v2/{self.name}"


def parse_reference(text: str) -> Reference:
    """Split ``host:port/name:tag@digest`` by docker's rules."""
    rest, _, digest = text.partition("@")
    first, slash, tail = rest.partition("/")
    has_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
    host, rest = (first, tail) if has_host else (DOCKER_HUB, rest)
    name, _, tag = rest.partition(":")
    if host == DOCKER_HUB and "/" not in name:
        name = f"library/{name}"
    return Reference(host, name, digest or tag or "latest")


def parse_challenge(challenge: str, schemes: Iterable[str]) -> tuple[str, dict[str, str]] | None:
    """Return URL and parameters for an anonymous token, from a 401 challenge.

    Only URLs of ``schemes`` count: an https registry must not send clients to http.
    """
    fields = dict(_FIELD.findall(challenge))
    realm = fields.pop("realm", "")
    known = challenge.startswith("Bearer ") and realm.startswith(tuple(f"{s}://" for s in schemes))
    return (realm, fields) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersPlan(TransferOptions):
    """``layers.json``: an image's blobs as a tree, byte for byte as in the registry."""

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str  # of the tree
    reference: str  # name@sha256:...
    plain: bool  # the registry speaks HTTP without TLS
    out: str
    keep: bool = field(default=False, metadata=OPTIONAL)  # for hosts that join later
    peers: Peers | None = field(default=None, metadata=OPTIONAL)
