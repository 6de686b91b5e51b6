"""Ask a model hub which commit a branch stands at and which files it holds, with their hashes."""

from __future__ import annotations

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
    return _locked(where, repo, revision, info)


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
        files.append(SourceFile(sibling.rfilename, sibling.size, sha256, git_sha1))
    if not info.sha or not files:
        raise LockError.one(where, "the hub names no commit or no files", "check the repository")
    files.sort(key=lambda file: file.path)
    return LockedSource(repo, revision, info.sha, tuple(files))
