"""Ask a model hub which commit a branch stands at and which files it holds, with their hashes."""

from __future__ import annotations

import re

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo

from spark_deploy.errors import LockError
from spark_deploy.lockfile.types import LockedSource, SourceFile

_TIMEOUT_S = 30
_COMMIT = re.compile("[0-9a-f]{40}")
_SHA256 = re.compile("[0-9a-f]{64}")


def look_up(endpoint: str, repo: str, revision: str, token: str | None) -> LockedSource:
    """Return the commit of ``revision`` and its files.

    Large files carry the sha256 of their content; small ones have nothing but the sha1 of their
    git blob (``lfs`` and ``blobId`` of the hub's ``?blobs=true`` answer).
    """
    where = f"{endpoint}/{repo}"
    try:
        info = HfApi(endpoint=endpoint, token=token or False).model_info(
            repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_S
        )
    except GatedRepoError as error:
        fix = "accept its terms on the hub and set hub.token"
        raise LockError.one(where, "the repository is gated", fix) from error
    except RevisionNotFoundError as error:
        fix = "correct sources.revision of the model"
        raise LockError.one(where, f"has no branch, tag or commit {revision}", fix) from error
    except RepositoryNotFoundError as error:
        fix = "correct the name, or set hub.token when it is private"
        raise LockError.one(where, "no such repository", fix) from error
    except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        what = f"the hub cannot be asked: {type(error).__name__}: {str(error).splitlines()[0]}"
        fix = "check hub.endpoint and the network of this machine, then run again"
        raise LockError.one(where, what, fix) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _no_hub(where, f"{type(error).__name__}: {error}") from error
    return _locked(where, repo, revision, info)


def _no_hub(where: str, why: str) -> LockError:
    fix = "correct hub.endpoint; a proxy may have answered in the hub's place"
    return LockError.one(where, f"the answer is not that of a hub ({why})", fix)


def _locked(where: str, repo: str, revision: str, info: ModelInfo) -> LockedSource:
    files = []
    for sibling in info.siblings or ():
        # Hub bookkeeping, no part of the model.
        if sibling.rfilename == ".gitattributes":
            continue
        sha256 = sibling.lfs.sha256 if sibling.lfs else None
        if sibling.size is None or (sha256 is None and sibling.blob_id is None):
            what = f"says neither size nor hash of {sibling.rfilename}"
            raise LockError.one(where, what, "set hub.endpoint to a hub that does")
        git_sha1 = None if sha256 else sibling.blob_id
        one = SourceFile(sibling.rfilename, sibling.size, sha256, git_sha1)
        if not _is_file(one):
            raise _no_hub(where, f"it describes a file as {one}")
        files.append(one)
    if not info.sha or not files:
        raise LockError.one(where, "the hub names no commit or no files", "check the repository")
    if not _is(_COMMIT, info.sha):
        raise _no_hub(where, f"it names the commit {info.sha}")
    files.sort(key=lambda file: file.path)
    return LockedSource(repo, revision, info.sha, tuple(files))


def _is_file(file: SourceFile) -> bool:
    size = file.size_bytes
    return (
        isinstance(file.path, str)
        and isinstance(size, int)
        and not isinstance(size, bool)
        and size >= 0
        and _is(_SHA256 if file.sha256 else _COMMIT, file.sha256 or file.git_sha1)
    )


def _is(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
