"""The lock as frozen data: names and their identities."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict
from pydantic.dataclasses import dataclass
from pydantic.json_schema import SkipJsonSchema
from spark_contract.units import COMMIT, SHA256

from spark_deploy.config.catalog.anatomy import Anatomy
from spark_deploy.config.catalog.profile import HUB_REPOSITORY
from spark_deploy.config.documents import CLOSED, FromKey, digest_of, name_entries

_Commit = Annotated[str, Field(json_schema_extra={"pattern": f"^{COMMIT}$"})]
_Sha256 = Annotated[str, Field(json_schema_extra={"pattern": f"^{SHA256}$"})]
_AtCommit = Annotated[str, Field(json_schema_extra={"pattern": f"^.+@{COMMIT}$"})]
_ImageDigest = Annotated[str, Field(json_schema_extra={"pattern": f"^sha256:{SHA256}$"})]
_ONE_HASH: JsonDict = {"oneOf": [{"required": ["sha256"]}, {"required": ["git_sha1"]}]}


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid", json_schema_extra=_ONE_HASH))
class SourceFile:
    """One file; sha256 for large files, git_sha1 (blob) for small ones."""

    path: str = Field(json_schema_extra={"pattern": r"^(?!/)(?!.*(^|/)\.\.(/|$)).+$"})
    """Path in the repository."""
    size_bytes: int = Field(ge=0)
    """Bytes."""
    sha256: _Sha256 | SkipJsonSchema[None] = None
    """Of the content."""
    git_sha1: _Commit | SkipJsonSchema[None] = None
    """Of the git blob."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class LockedSource:
    """One repository at one commit."""

    repo: FromKey
    revision: str
    """Branch or tag that was looked up."""
    commit: _Commit
    """Full commit."""
    files: tuple[SourceFile, ...]
    """Every file of the commit that is fetched."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """Files of the commit that are not fetched, by path, and why not."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tree."""
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """Identity of the tree's content (not of where it comes from)."""
        return digest_of({"repo": self.repo, "commit": self.commit, "files": self.files})


@dataclass(frozen=True, slots=True, config=CLOSED)
class LockedImage:
    """One image at one digest."""

    reference: FromKey
    digest: _ImageDigest
    """Of the manifest or manifest list the tag names."""
    size_bytes: Annotated[int, Field(ge=0)]
    """Compressed layers of the expected architecture."""

    @property
    def pinned(self) -> str:
        """``name@sha256:...``, the only form that reaches a host."""
        return f"{without_tag(self.reference)}@{self.digest}"


@dataclass(frozen=True, slots=True, config=CLOSED)
class HeldNames:
    """Sources of a build whose names and shapes were held against the catalog, by their headers."""

    build: FromKey
    question: _Sha256
    """Digest of what was asked, commits and sets."""
    base: _AtCommit
    """Repository and commit of the base."""
    donor: _AtCommit | SkipJsonSchema[None] = None
    """Repository and commit of the donor."""
    base_tensors: int = Field(default=0, ge=0)
    """Names that the base has."""
    donor_tensors: int = Field(default=0, ge=0)
    """Names of the donor that a build may ask for."""
    swapped_modules: int = Field(default=0, ge=0)
    """Modules whose weights are compared or replaced."""
    mtp_tensors: int = Field(default=0, ge=0)
    """Names of the drafter."""
    mtp_from_donor: int = Field(default=0, ge=0)
    """Of these, names that only the donor has."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class Lock:
    """Names and their identities; written by `spark-deploy update`."""

    schema_version: Literal[1]
    """Format of this file."""
    sources: Annotated[
        dict[str, LockedSource],
        name_entries("repo"),
        Field(json_schema_extra={"propertyNames": HUB_REPOSITORY}),
    ]
    """Repositories by name."""
    images: Annotated[dict[str, LockedImage], name_entries("reference")]
    """Container images by reference."""
    names: Annotated[dict[str, HeldNames], name_entries("build")] = Field(default_factory=dict)
    """What was found of the names of each build, before its sources are downloaded."""
    anatomies: Annotated[dict[str, Anatomy], name_entries("repository")] = Field(
        default_factory=dict, json_schema_extra={"propertyNames": HUB_REPOSITORY}
    )
    """What headers and config.json of repositories say that are served as published."""

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
