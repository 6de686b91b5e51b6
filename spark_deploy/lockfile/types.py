"""The lock as frozen data: names and their identities."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict
from pydantic.config import JsonDict
from pydantic.json_schema import SkipJsonSchema

from spark_deploy.catalog.model import HUB_REPOSITORY
from spark_deploy.documents.declare import knowing_keys, needed, of_key, setting
from spark_deploy.documents.digest import digest_of

_GIT_HASH = "^[0-9a-f]{40}$"
_ONE_HASH: JsonDict = {"oneOf": [{"required": ["sha256"]}, {"required": ["git_sha1"]}]}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file; sha256 for large files, git_sha1 (blob) for small ones."""

    __pydantic_config__: ClassVar = ConfigDict(json_schema_extra=_ONE_HASH)

    path: str = needed("Path in the repository.", pattern=r"^(?!/)(?!.*(^|/)\.\.(/|$)).+$")
    size_bytes: int = needed("Bytes.", minimum=0)
    sha256: str | SkipJsonSchema[None] = setting(None, "Of the content.", pattern="^[0-9a-f]{64}$")
    git_sha1: str | SkipJsonSchema[None] = setting(None, "Of the git blob.", pattern=_GIT_HASH)


@dataclass(frozen=True, slots=True)
class LockedSource:
    """One repository at one commit."""

    repo: SkipJsonSchema[str] = of_key()
    revision: str = needed("Branch or tag that was looked up.")
    commit: str = needed("Full commit.", pattern=_GIT_HASH)
    files: tuple[SourceFile, ...] = needed("Every file of the commit.")

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tree."""
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """Identity of the tree's content (not of where it comes from)."""
        return digest_of({"repo": self.repo, "commit": self.commit, "files": self.files})


@dataclass(frozen=True, slots=True)
class LockedImage:
    """One image at one digest."""

    reference: SkipJsonSchema[str] = of_key()
    digest: str = needed(
        "Of the manifest or manifest list the tag names.", pattern="^sha256:[0-9a-f]{64}$"
    )
    size_bytes: int = needed("Compressed layers of the expected architecture.", minimum=0)

    @property
    def pinned(self) -> str:
        """``name@sha256:...``, the only form that reaches a host."""
        return f"{without_tag(self.reference)}@{self.digest}"


@dataclass(frozen=True, slots=True)
class Lock:
    """Names and their identities; written by `spark-deploy lock`."""

    schema_version: Literal[1] = needed("Format of this file.")
    sources: Annotated[dict[str, LockedSource], knowing_keys("repo")] = needed(
        "Repositories by name.", propertyNames={"pattern": HUB_REPOSITORY}
    )
    images: Annotated[dict[str, LockedImage], knowing_keys("reference")] = needed(
        "Container images by reference."
    )

    @classmethod
    def of(cls, sources: Iterable[LockedSource] = (), images: Iterable[LockedImage] = ()) -> Lock:
        """Return a lock, sorted by name; of two entries with one name the later counts."""
        by_repo = {source.repo: source for source in sources}
        by_reference = {image.reference: image for image in images}
        return cls(1, dict(sorted(by_repo.items())), dict(sorted(by_reference.items())))

    def also(self, sources: Iterable[LockedSource], images: Iterable[LockedImage]) -> Lock:
        """Return this lock with more entries; a name that is there already is replaced."""
        return Lock.of([*self.sources.values(), *sources], [*self.images.values(), *images])

    def source(self, repo: str, revision: str) -> LockedSource | None:
        """Return the locked commit of ``repo`` at ``revision``, if there is one."""
        found = self.sources.get(repo)
        return found if found and found.revision == revision else None


def without_tag(reference: str) -> str:
    """Return the name of an image without tag and digest; a registry's port stays."""
    name = reference.split("@", 1)[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.split(':', 1)[0]}"
