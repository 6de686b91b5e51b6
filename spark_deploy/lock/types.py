"""The lock as frozen data: names and their identities."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict
from pydantic.config import JsonDict
from pydantic.json_schema import SkipJsonSchema
from spark_contract.units import COMMIT, SHA256

from spark_deploy.config.catalog.anatomy import Anatomy
from spark_deploy.config.catalog.companions import HUB_REPOSITORY
from spark_deploy.config.documents.declare import knowing_keys, needed, of_key, setting
from spark_deploy.config.documents.digest import digest_of

_GIT_HASH = f"^{COMMIT}$"
_SHA256 = f"^{SHA256}$"
_ONE_HASH: JsonDict = {"oneOf": [{"required": ["sha256"]}, {"required": ["git_sha1"]}]}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file; sha256 for large files, git_sha1 (blob) for small ones."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(json_schema_extra=_ONE_HASH)

    path: str = needed("Path in the repository.", pattern=r"^(?!/)(?!.*(^|/)\.\.(/|$)).+$")
    size_bytes: int = needed("Bytes.", minimum=0)
    sha256: str | SkipJsonSchema[None] = setting(None, "Of the content.", pattern=_SHA256)
    git_sha1: str | SkipJsonSchema[None] = setting(None, "Of the git blob.", pattern=_GIT_HASH)


@dataclass(frozen=True, slots=True)
class LockedSource:
    """One repository at one commit."""

    repo: SkipJsonSchema[str] = of_key()
    revision: str = needed("Branch or tag that was looked up.")
    commit: str = needed("Full commit.", pattern=_GIT_HASH)
    files: tuple[SourceFile, ...] = needed("Every file of the commit that is fetched.")
    left_out: dict[str, str] = setting(
        dict, "Files of the commit that are not fetched, by path, and why not."
    )

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
        "Of the manifest or manifest list the tag names.", pattern=f"^sha256:{SHA256}$"
    )
    size_bytes: int = needed("Compressed layers of the expected architecture.", minimum=0)

    @property
    def pinned(self) -> str:
        """``name@sha256:...``, the only form that reaches a host."""
        return f"{without_tag(self.reference)}@{self.digest}"


@dataclass(frozen=True, slots=True)
class HeldNames:
    """Sources of a build whose names and shapes were held against the catalog, by their headers."""

    build: SkipJsonSchema[str] = of_key()
    question: str = needed("Digest of what was asked, commits and sets.", pattern=_SHA256)
    base: str = needed("Repository and commit of the base.", pattern=f"^.+@{COMMIT}$")
    donor: str | SkipJsonSchema[None] = setting(
        None, "Repository and commit of the donor.", pattern=f"^.+@{COMMIT}$"
    )
    base_tensors: int = setting(0, "Names that the base has.", minimum=0)
    donor_tensors: int = setting(0, "Names of the donor that a build may ask for.", minimum=0)
    swapped_modules: int = setting(0, "Modules whose weights are compared or replaced.", minimum=0)
    mtp_tensors: int = setting(0, "Names of the drafter.", minimum=0)
    mtp_from_donor: int = setting(0, "Of these, names that only the donor has.", minimum=0)


@dataclass(frozen=True, slots=True)
class Lock:
    """Names and their identities; written by `spark-deploy update`."""

    schema_version: Literal[1] = needed("Format of this file.")
    sources: Annotated[dict[str, LockedSource], knowing_keys("repo")] = needed(
        "Repositories by name.", propertyNames=HUB_REPOSITORY
    )
    images: Annotated[dict[str, LockedImage], knowing_keys("reference")] = needed(
        "Container images by reference."
    )
    names: Annotated[dict[str, HeldNames], knowing_keys("build")] = setting(
        dict, "What was found of the names of each build, before its sources are downloaded."
    )
    anatomies: Annotated[dict[str, Anatomy], knowing_keys("repository")] = setting(
        dict,
        "What headers and config.json of repositories say that are served as published.",
        propertyNames=HUB_REPOSITORY,
    )

    @classmethod
    def of(
        cls,
        sources: Iterable[LockedSource] = (),
        images: Iterable[LockedImage] = (),
        names: Iterable[HeldNames] = (),
        anatomies: Iterable[Anatomy] = (),
    ) -> Lock:
        """Return a lock, sorted by name; of two entries with one name the later counts."""
        by_repo = {source.repo: source for source in sources}
        by_reference = {image.reference: image for image in images}
        # What was found of a commit that is locked no more says nothing.
        locked = {f"{source.repo}@{source.commit}" for source in by_repo.values()} | {None}
        by_build = {one.build: one for one in names if {one.base, one.donor} <= locked}
        read = {
            one.repository: one for one in anatomies if f"{one.repository}@{one.commit}" in locked
        }
        return cls(
            schema_version=1,
            sources=dict(sorted(by_repo.items())),
            images=dict(sorted(by_reference.items())),
            names=dict(sorted(by_build.items())),
            anatomies=dict(sorted(read.items())),
        )

    def also(
        self,
        sources: Iterable[LockedSource] = (),
        images: Iterable[LockedImage] = (),
        names: Iterable[HeldNames] = (),
        anatomies: Iterable[Anatomy] = (),
    ) -> Lock:
        """Return this lock with more entries; a name that is there already is replaced."""
        return Lock.of(
            [*self.sources.values(), *sources],
            [*self.images.values(), *images],
            [*self.names.values(), *names],
            [*self.anatomies.values(), *anatomies],
        )

    def holds(self, asked: HeldNames) -> bool:
        """Return whether this very question was answered."""
        found = self.names.get(asked.build)
        return found is not None and found.question == asked.question

    def source(self, repo: str, revision: str) -> LockedSource | None:
        """Return the locked commit of ``repo`` at ``revision``, if there is one."""
        found = self.sources.get(repo)
        return found if found and found.revision == revision else None


def without_tag(reference: str) -> str:
    """Return the name of an image without tag and digest; a registry's port stays."""
    name = reference.split("@", 1)[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.split(':', 1)[0]}"
