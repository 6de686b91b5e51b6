"""What the fetcher is told: ``fetch.json``, from controller to host."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import ClassVar

from spark_contract.documents import OPTIONAL, DocumentError, in_range, of_form, plain_directory
from spark_contract.paths import RECEIPT_NAME
from spark_contract.sharing import Peers
from spark_contract.units import COMMIT, SHA256


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
