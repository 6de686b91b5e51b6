"""The lock as frozen data: names and their identities."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source tree; exactly one of ``sha256`` and ``git_sha1`` is set."""

    path: str
    size_bytes: int
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True, slots=True)
class LockedSource:
    """One repository at one commit."""

    repo: str
    revision: str  # branch or tag that was looked up
    commit: str
    files: tuple[SourceFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tree."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class LockedImage:
    """One image at one digest; ``size_bytes`` are its compressed layers."""

    reference: str
    digest: str
    size_bytes: int

    @property
    def pinned(self) -> str:
        """``name@sha256:...``, the only form that reaches a host."""
        return f"{without_tag(self.reference)}@{self.digest}"


@dataclass(frozen=True, slots=True)
class Lock:
    """Everything that is locked."""

    sources: tuple[LockedSource, ...] = ()
    images: tuple[LockedImage, ...] = ()

    def source(self, repo: str, revision: str) -> LockedSource | None:
        """Return the locked commit of ``repo`` at ``revision``, if there is one."""
        for source in self.sources:
            if (source.repo, source.revision) == (repo, revision):
                return source
        return None

    def image(self, reference: str) -> LockedImage | None:
        """Return the locked digest of ``reference``; one written with a digest locks itself."""
        for image in self.images:
            if image.reference == reference:
                return image
        return None


def without_tag(reference: str) -> str:
    """Return the name of an image without tag and digest; a registry's port stays."""
    name = reference.split("@", 1)[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.split(':', 1)[0]}"
