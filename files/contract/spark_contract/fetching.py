"""Documents of the fetcher: downloads, peer downloads and image layers."""

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
    digest: str  # as in the receipt
    dir: str
    job: str  # digest12 of the job; peers query the progress
    # A download lists each verified file; a build lists its files only at the end.
    unfinished: bool


@dataclass(frozen=True, slots=True)
class Share:
    SCHEMA_VERSION: ClassVar[int] = 1

    address: str
    port: int
    trees: tuple[SharedTree, ...]


@dataclass(frozen=True, slots=True)
class Peers:
    urls: tuple[str, ...]  # of hosts, in order of preference; see tree_url
    key_file: str = field(default=SHARE_KEY, metadata=OPTIONAL)
    # Skip a peer that has made no progress for this time.
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
    return out.parent / f".{out.name}.partial"


def partial_tree(out: Path) -> Path:
    return partial_dir(out) / "tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    tries: int = 8  # attempts without progress, for each source
    # Keep trying the hub for at least this time, because connections can fail for hours.
    outage_s: float = field(default=0.0, metadata=OPTIONAL)
    backoff_s: float = 1.0  # before the second try; doubles up to 30
    # Never sent to peers, mirrors or redirect targets.
    token_file: str | None = field(default=None, metadata=OPTIONAL)
    parallel: int = field(default=4, metadata=OPTIONAL)
    timeout_s: float = field(default=30.0, metadata=OPTIONAL)
    rate_limit_bytes_per_s: int | None = field(default=None, metadata=OPTIONAL)
    # Abandon a mirror or peer if the total rate of its requests is lower.
    slow_bytes_per_s: int = field(default=1_000_000, metadata=OPTIONAL)
    slow_after_s: float = field(default=10.0, metadata=OPTIONAL)  # duration of the measurement

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
        """Return the rate below which a slow source is abandoned: at most half the rate limit."""
        if self.rate_limit_bytes_per_s is None:
            return self.slow_bytes_per_s
        return min(self.slow_bytes_per_s, self.rate_limit_bytes_per_s / 2)


@dataclass(frozen=True, slots=True)
class FetchFile:
    path: str  # relative, with forward slashes
    size_bytes: int
    sha256: str | None = field(default=None, metadata=OPTIONAL)
    git_sha1: str | None = field(default=None, metadata=OPTIONAL)  # of a small file's git blob

    def __post_init__(self) -> None:
        if not is_inside(self.path):
            raise DocumentError(f"files: path {self.path!r} points outside the directory")
        if self.path == RECEIPT_NAME or self.path.endswith(".part"):
            raise DocumentError(f"files: path {self.path!r} is reserved")
        if self.sha256 is None and self.git_sha1 is None:
            raise DocumentError(f"files: {self.path}: sha256 and git_sha1 are missing")
        check_pattern(f"files: {self.path}: sha256", self.sha256, SHA256)
        check_pattern(f"files: {self.path}: git_sha1", self.git_sha1, COMMIT)
        check_range(f"files: {self.path}: size_bytes", self.size_bytes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan(TransferOptions):
    """``fetch.json``: the files of a repository at a commit, and their sources."""

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str
    name: str
    commit: str
    out: str  # created atomically
    files: tuple[FetchFile, ...]
    urls: tuple[str, ...]  # a file's path is appended; mirrors first, the hub last
    peers: Peers | None = field(default=None, metadata=OPTIONAL)  # preferred over urls
    pieces: bool  # also hash each piece of 4 MiB
    look_in: tuple[str, ...]  # globs of local directories to search first
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
        for path in paths:
            if paths.count(path) > 1:
                raise DocumentError(f"files: path {path!r} occurs twice")
        if not paths:
            raise DocumentError("files: empty")
        if not self.urls and not self.look_in:
            raise DocumentError("urls: empty")

    @property
    def out_dir(self) -> Path:
        return Path(self.out)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def is_inside(path: str) -> bool:
    """Return whether a path is relative, normalized and without ``..``."""
    relative = PurePosixPath(path)
    is_below = bool(relative.parts) and not relative.is_absolute() and ".." not in relative.parts
    return is_below and "\0" not in path and str(relative) == path


DOCKER_HUB = "registry-1.docker.io"
# Cancel an image pull that stays below the minimum rate for this time.
PULL_STALL_S = 300.0
PULL_MIN_BYTES_PER_S = 1024
ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}
MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_CHALLENGE_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Reference:
    host: str
    name: str
    version: str

    def base_url(self, *, plain: bool) -> str:
        return f"{'http' if plain else 'https'}://{self.host}/v2/{self.name}"


def parse_reference(text: str) -> Reference:
    """Split ``host:port/name:tag@digest`` as docker does."""
    host_and_path, _, digest = text.partition("@")
    host, slash, path = host_and_path.partition("/")
    is_host = slash and ("." in host or ":" in host or host == "localhost")
    if not is_host:
        host, path = DOCKER_HUB, host_and_path
    if host in ("docker.io", "index.docker.io"):
        host = DOCKER_HUB
    name, _, tag = path.partition(":")
    if host == DOCKER_HUB and "/" not in name:
        name = f"library/{name}"
    return Reference(host, name, digest or tag or "latest")


def parse_challenge(challenge: str, schemes: Iterable[str]) -> tuple[str, dict[str, str]] | None:
    """Return the URL and parameters of the token service from a 401 challenge, or None.

    The URL ends with ``?`` or ``&``, because nvcr.io's has a parameter. It must have one of the
    ``schemes``, because an https registry must not redirect to http.
    """
    parameters = dict(_CHALLENGE_PARAMETER.findall(challenge))
    realm = parameters.pop("realm", "")
    is_allowed = realm.startswith(tuple(f"{scheme}://" for scheme in schemes))
    is_bearer = challenge.startswith("Bearer ")
    url = f"{realm}{'&' if '?' in realm else '?'}"
    return (url, parameters) if is_bearer and is_allowed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersPlan(TransferOptions):
    """``layers.json``: download the unmodified blobs of an image into a tree."""

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str  # of the tree
    reference: str  # name@sha256:...
    plain: bool  # the registry speaks HTTP without TLS
    out: str
    # Keep the blobs after the pull, for hosts that join later.
    keep: bool = field(default=False, metadata=OPTIONAL)
    peers: Peers | None = field(default=None, metadata=OPTIONAL)
