"""Types of the lock, and which files of a repository are downloaded."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict
from pydantic.dataclasses import dataclass
from pydantic.json_schema import SkipJsonSchema
from spark_contract.builder_api import BuildPlan
from spark_contract.documents import to_plain
from spark_contract.units import COMMIT, SHA256

from spark_deploy.config.catalog.architecture import RepoMetadata
from spark_deploy.config.catalog.profile import HUB_REPOSITORY
from spark_deploy.config.documents import CLOSED, FromKey, digest_of, key_as_field
from spark_deploy.config.errors import LockError

_Commit = Annotated[str, Field(json_schema_extra={"pattern": f"^{COMMIT}$"})]
_Sha256 = Annotated[str, Field(json_schema_extra={"pattern": f"^{SHA256}$"})]
_AtCommit = Annotated[str, Field(json_schema_extra={"pattern": f"^.+@{COMMIT}$"})]
_ImageDigest = Annotated[str, Field(json_schema_extra={"pattern": f"^sha256:{SHA256}$"})]
_ONE_HASH: JsonDict = {"oneOf": [{"required": ["sha256"]}, {"required": ["git_sha1"]}]}


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid", json_schema_extra=_ONE_HASH))
class SourceFile:
    """A file in a repository; the hub lists sha256 for large files and git_sha1 for small ones."""

    path: str = Field(json_schema_extra={"pattern": r"^(?!/)(?!.*(^|/)\.\.(/|$)).+$"})
    """Path in the repository."""
    size_bytes: int = Field(ge=0)
    """Size."""
    sha256: _Sha256 | SkipJsonSchema[None] = None
    """Hash of the content."""
    git_sha1: _Commit | SkipJsonSchema[None] = None
    """Hash of the git blob."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class LockedSource:
    """A repository at a commit."""

    repo: FromKey
    revision: str
    """Requested branch, tag or commit."""
    commit: _Commit
    """Commit of the revision."""
    files: tuple[SourceFile, ...]
    """Files to download."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """Files that are not downloaded, by path, with the reason."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """Digest of the content, independent of the hub's address."""
        return digest_of({"repo": self.repo, "commit": self.commit, "files": self.files})


@dataclass(frozen=True, slots=True, config=CLOSED)
class LockedImage:
    """An image at a digest."""

    reference: FromKey
    digest: _ImageDigest
    """Digest of the manifest or manifest list."""
    size_bytes: Annotated[int, Field(ge=0)]
    """Size of the compressed layers for the expected architecture."""

    @property
    def pinned(self) -> str:
        """``name@sha256:...``, the only form that reaches a host."""
        return f"{image_name(self.reference)}@{self.digest}"


@dataclass(frozen=True, slots=True, config=CLOSED)
class VerifiedNames:
    """Tensor counts of sources whose headers match the catalog."""

    build: FromKey
    fingerprint: _Sha256
    """Digest of the commits and tensor sets that were compared."""
    base: _AtCommit
    """Repository and commit of the base."""
    donor: _AtCommit | SkipJsonSchema[None] = None
    """Repository and commit of the FP8 source."""
    base_tensors: int = Field(default=0, ge=0)
    """Tensors of the base."""
    donor_tensors: int = Field(default=0, ge=0)
    """Tensors of the FP8 source that a build can use."""
    swapped_modules: int = Field(default=0, ge=0)
    """Modules with compared or replaced weights."""
    mtp_tensors: int = Field(default=0, ge=0)
    """Tensors of the drafter."""
    mtp_from_donor: int = Field(default=0, ge=0)
    """Tensors of the drafter that only the FP8 source contains."""
    donor_sha256: _Sha256 | SkipJsonSchema[None] = None
    """Hash of the FP8 source's tensors in the first build; later builds require it."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class Lock:
    """Locked commits and digests, written by `spark-deploy update`."""

    schema_version: Literal[1]
    """Format of this file."""
    sources: Annotated[
        dict[str, LockedSource],
        key_as_field("repo"),
        Field(json_schema_extra={"propertyNames": HUB_REPOSITORY}),
    ]
    """Repositories by name."""
    images: Annotated[dict[str, LockedImage], key_as_field("reference")]
    """Container images by reference."""
    names: Annotated[dict[str, VerifiedNames], key_as_field("build")] = Field(default_factory=dict)
    """Verified tensor names per build."""
    repo_metadata: Annotated[dict[str, RepoMetadata], key_as_field("repository")] = Field(
        default_factory=dict, json_schema_extra={"propertyNames": HUB_REPOSITORY}
    )
    """Headers and config.json of repositories that are served as published."""

    def with_entries(
        self,
        sources: Iterable[LockedSource] = (),
        images: Iterable[LockedImage] = (),
        names: Iterable[VerifiedNames] = (),
        repo_metadata: Iterable[RepoMetadata] = (),
    ) -> "Lock":
        """Return a sorted lock with new entries; drop results for commits that it replaces."""
        by_repo = self.sources | {source.repo: source for source in sources}
        by_reference = self.images | {image.reference: image for image in images}
        locked = {f"{source.repo}@{source.commit}" for source in by_repo.values()}
        by_build = self.names | {item.build: item for item in names}
        metadata_by_repo = self.repo_metadata | {item.repository: item for item in repo_metadata}
        return Lock(
            schema_version=1,
            sources=dict(sorted(by_repo.items())),
            images=dict(sorted(by_reference.items())),
            names={
                build: verified
                for build, verified in sorted(by_build.items())
                if verified.base in locked and (not verified.donor or verified.donor in locked)
            },
            repo_metadata={
                repo: metadata
                for repo, metadata in sorted(metadata_by_repo.items())
                if f"{repo}@{metadata.commit}" in locked
            },
        )

    def has_result_for(self, names: VerifiedNames) -> bool:
        """Return whether the lock records ``names`` as verified, with the same fingerprint."""
        verified = self.names.get(names.build)
        return verified is not None and verified.fingerprint == names.fingerprint

    def donor_sha256(self, names: VerifiedNames) -> str | None:
        """Return the locked hash of the FP8 source tensors that a build reads, if any."""
        return self.names[names.build].donor_sha256 if self.has_result_for(names) else None

    def source(self, repo: str, revision: str) -> LockedSource | None:
        source = self.sources.get(repo)
        return source if source and source.revision == revision else None


EMPTY_LOCK = Lock(schema_version=1, sources={}, images={})

# Fields of a build plan that do not affect the required tensor names.
_UNRELATED_FIELDS = ("digest", "recipe_version", "base", "donor", "layout", "out", "extra")


def names_to_verify(
    build: BuildPlan, base: LockedSource, donor: LockedSource | None
) -> VerifiedNames:
    """Return the names to verify for a build, without the counts."""
    fields = {key: value for key, value in to_plain(build).items() if key not in _UNRELATED_FIELDS}
    versions = [f"{source.repo}@{source.commit}" for source in (base, donor) if source is not None]
    return VerifiedNames(
        build=f"{build.name}, shared experts {build.shared_experts}, head {build.head}",
        fingerprint=digest_of({"builder": fields, "places": versions}),
        base=versions[0],
        donor=versions[1] if donor is not None else None,
    )


def image_name(reference: str) -> str:
    """Remove tag and digest from an image reference; keep the registry's port."""
    name = reference.split("@", 1)[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.split(':', 1)[0]}"


_PICKLE = "reading this file can run code (pickle)"
_CODE = "code, or a file of unknown type"
_PICKLES = frozenset({
    *("bin", "ckpt", "dill", "h5", "joblib", "keras", "mar", "nemo", "npy", "npz"),
    *("p", "pickle", "pk", "pkl", "pt", "pt2", "pth", "t7"),
})  # fmt: skip
_DATA = frozenset({
    *("gguf", "safetensors"),
    *("bpe", "codes", "model", "spm", "tiktoken", "vocab"),
    *("csv", "j2", "jinja", "jinja2", "json", "jsonl", "toml", "tsv", "txt", "yaml", "yml"),
    *("bib", "cff", "license", "markdown", "md", "pdf", "rst"),
    *("bmp", "gif", "ico", "jpeg", "jpg", "png", "svg", "webp"),
    *("flac", "mp3", "mp4", "ogg", "wav", "webm"),
})  # fmt: skip
# A version may follow: tokenizer.model.v3
_VERSION = re.compile(r"(?<=\.model)\.v[0-9]+(m[0-9]+)?$")


def why_not_downloaded(path: str) -> str | None:
    """Return why a file is not downloaded, or None."""
    name = PurePosixPath(path).name.lower()
    suffix = PurePosixPath(_VERSION.sub("", name)).suffix.removeprefix(".")
    if not suffix or suffix in _DATA:
        return None
    return _PICKLE if suffix in _PICKLES else _CODE


def split_files(
    where: str, files: Iterable[SourceFile]
) -> tuple[tuple[SourceFile, ...], dict[str, str]]:
    """Return the files to download, and the excluded paths with the reason."""
    downloaded, left_out = [], {}
    for file in files:
        reason = why_not_downloaded(file.path)
        if reason is None:
            downloaded.append(file)
        else:
            left_out[file.path] = reason
    pickles = [path for path, reason in left_out.items() if reason == _PICKLE]
    if pickles and not any(file.path.endswith(".safetensors") for file in downloaded):
        message = f"all weights are pickle files ({pickles[0]}), which are not downloaded"
        raise LockError.single(where, message, "use a repository with safetensors")
    return tuple(downloaded), left_out
