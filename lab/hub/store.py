"""The hub's files on disk: ``<org>/<name>/<commit>/...`` and ``<org>/<name>/refs/<ref>``.

A file ``<org>/<name>/token`` makes the repository gated: only that bearer token opens it.
"""

import hashlib
import re
import threading
from dataclasses import dataclass
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt")
_WEIGHT_NAMES = ("tokenizer.json",)


class NotFoundError(Exception):
    def __init__(self, code: str, what: str):
        self.code = code  # the hub's X-Error-Code
        super().__init__(what)


class GatedError(Exception):
    """The request lacks the token of a gated repository."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    path: str
    size_bytes: int
    sha256: str
    git_sha1: str
    large: bool
    disk_path: Path

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.git_sha1


@dataclass(frozen=True, slots=True)
class Commit:
    repo: str
    sha: str
    files: tuple[FileRecord, ...]

    def file(self, path: str) -> FileRecord:
        for record in self.files:
            if record.path == path:
                return record
        raise NotFoundError("EntryNotFound", f"{path} is not in {self.repo}@{self.sha[:12]}")


class Store:
    def __init__(self, root: Path):
        self._root = root
        self._digests: dict[tuple[str, int, int], tuple[str, str]] = {}
        self._by_sha256: dict[str, FileRecord] = {}
        self._lock = threading.Lock()

    def repositories(self) -> dict[str, dict[str, str]]:
        return {
            ref.parents[1].relative_to(self._root).as_posix(): {"main": ref.read_text().strip()}
            for ref in sorted(self._root.glob("*/*/refs/main"))
        }

    def commit(self, repo: str, revision: str | None, token: str | None = None) -> Commit:
        directory = self._root / repo
        if ".." in repo or not (directory / "refs").is_dir():
            raise NotFoundError("RepoNotFound", f"{repo} does not exist")
        gate = directory / "token"
        if gate.exists() and gate.read_text().strip() != token:
            raise GatedError(repo)
        sha = self._sha(directory, revision or "main")
        if sha is None:
            raise NotFoundError("RevisionNotFound", f"{repo} has no revision {revision}")
        files = tuple(self._record(directory / sha, path) for path in _files(directory / sha))
        with self._lock:
            self._by_sha256.update((record.sha256, record) for record in files)
        return Commit(repo, sha, files)

    def by_sha256(self, sha256: str) -> FileRecord | None:
        with self._lock:
            return self._by_sha256.get(sha256)

    @staticmethod
    def _sha(directory: Path, revision: str) -> str | None:
        if _COMMIT.fullmatch(revision):
            return revision if (directory / revision).is_dir() else None
        ref = directory / "refs" / revision
        if ".." in revision or not ref.is_file():
            return None
        return ref.read_text().strip()

    def _record(self, root: Path, path: Path) -> FileRecord:
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns)
        if key not in self._digests:
            self._digests[key] = _digests(path, stat.st_size)
        sha256, git_sha1 = self._digests[key]
        return FileRecord(
            path=path.relative_to(root).as_posix(),
            size_bytes=stat.st_size,
            sha256=sha256,
            git_sha1=git_sha1,
            large=path.name.endswith(_WEIGHT_SUFFIXES) or path.name in _WEIGHT_NAMES,
            disk_path=path,
        )


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _digests(path: Path, size_bytes: int) -> tuple[str, str]:
    sha256 = hashlib.sha256()
    git_sha1 = hashlib.sha1(f"blob {size_bytes}\0".encode())
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
            git_sha1.update(block)
    return sha256.hexdigest(), git_sha1.hexdigest()
