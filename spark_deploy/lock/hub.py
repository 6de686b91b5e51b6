"""Look up the commit and files of a hub repository."""

import re
import time
from collections.abc import Iterator
from typing import NamedTuple

import httpx2
from huggingface_hub import HfApi, get_session
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo
from spark_contract import documents
from spark_contract.documents import DocumentError
from spark_contract.fetching import FetchFile
from spark_contract.units import COMMIT

from spark_deploy.config.errors import LockError, one_line, without_errno
from spark_deploy.lock.registry import LOOKUP_TIMEOUT_S, run_with_timeout
from spark_deploy.lock.types import LockedSource, SourceFile, split_files

_TIMEOUT_S = 30
_MAX_BODY_S = 300
_MAX_BODY_BYTES = 64 << 20  # a file needs about 300
_COMMIT = re.compile(COMMIT)
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_MAX_FILE_BYTES = 1 << 50  # no file is larger


class _LimitedBody(httpx2.SyncByteStream):
    """A response body with a limit on size and time."""

    def __init__(self, body: httpx2.SyncByteStream) -> None:
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        received, started = 0, time.monotonic()
        for chunk in self._body:
            received += len(chunk)
            if received > _MAX_BODY_BYTES:
                raise httpx2.ReadError(f"the response is too long ({received} bytes)")
            if time.monotonic() - started > _MAX_BODY_S:
                raise httpx2.ReadError(f"the response took too long ({_MAX_BODY_S} s)")
            yield chunk

    def close(self) -> None:
        self._body.close()


def _limit_body(response: httpx2.Response) -> None:
    if isinstance(response.stream, httpx2.SyncByteStream):
        response.stream = _LimitedBody(response.stream)


def _prepare_client() -> None:
    """Make the hub client limit responses, reject redirects to http and disable compression."""
    client = get_session()
    client.headers["Accept-Encoding"] = "identity"
    hooks = client.event_hooks
    if _limit_body not in hooks["response"]:
        added = [_limit_body, _reject_redirect_to_http]
        client.event_hooks = {**hooks, "response": [*hooks["response"], *added]}


def look_up_repo(endpoint: str, repo: str, revision: str, token: str | None) -> LockedSource:
    where = f"{endpoint}/{repo}"
    try:
        info = _model_info(endpoint, repo, revision, token, files_metadata=True)
    except GatedRepoError as error:
        fix = f"accept the terms at {where}, then run `hf auth login` or set hub.token"
        raise LockError.single(where, "the repository is gated", fix) from error
    except RevisionNotFoundError as error:
        fix = "correct sources.revision in the model file"
        raise LockError.single(
            where, f"the repository has no branch, tag or commit {revision}", fix
        ) from error
    except RepositoryNotFoundError as error:
        fix = "correct the name; for a private repository, run `hf auth login` or set hub.token"
        raise LockError.single(where, "no such repository", fix) from error
    except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        reason = f"{type(error).__name__}: {without_errno(one_line(error))}"
        message = f"the hub cannot be reached: {reason}"
        fix = "check hub.endpoint and this machine's network, then run the command again"
        raise LockError.single(where, message, fix) from error
    except _MALFORMED as error:
        raise _not_a_hub_error(where, f"{type(error).__name__}: {error}") from error
    return _make_source(where, repo, revision, info)


class ModelCard(NamedTuple):
    license: str = ""
    is_gated: bool = False
    task: str = ""  # the hub's name: text-generation, sentence-similarity, ...


def read_model_card(endpoint: str, repo: str, revision: str, token: str | None) -> ModelCard:
    """Return the hub's data about a model; unknown values are empty."""
    try:
        info = _model_info(endpoint, repo, revision, token)
        data = getattr(info, "card_data", None)
        licenses = [data.get("license")] if data is not None else []
        tags = [str(tag) for tag in info.tags or ()]
        licenses += [t.removeprefix("license:") for t in tags if t.startswith("license:")]
    except (HfHubHTTPError, httpx2.HTTPError, OSError, *_MALFORMED):
        return ModelCard()
    license = next((name for name in licenses if isinstance(name, str) and name), "")
    task = info.pipeline_tag if isinstance(info.pipeline_tag, str) else ""
    return ModelCard(one_line(license)[:60] if license else "", bool(info.gated), task)


def _model_info(
    endpoint: str, repo: str, revision: str, token: str | None, *, files_metadata: bool = False
) -> ModelInfo:
    _prepare_client()
    api = HfApi(endpoint=endpoint, token=token or False)
    try:
        return run_with_timeout(
            LOOKUP_TIMEOUT_S,
            lambda: api.model_info(
                repo, revision=revision, files_metadata=files_metadata, timeout=_TIMEOUT_S
            ),
        )
    except HfHubHTTPError as error:
        # With an expired token, the hub denies access even to public repositories.
        if not token or error.response.status_code != 401 or type(error) is not HfHubHTTPError:
            raise
        return _model_info(endpoint, repo, revision, None, files_metadata=files_metadata)


def _reject_redirect_to_http(response: httpx2.Response) -> None:
    if response.has_redirect_location and response.url.scheme == "https":
        target = response.url.join(response.headers["location"])
        if target.scheme != "https":
            message = f"the hub redirects from https to {one_line(target.scheme)}"
            raise httpx2.UnsupportedProtocol(message, request=response.request)


def _not_a_hub_error(where: str, reason: str) -> LockError:
    message = f"the server does not respond like a Hugging Face hub ({one_line(reason)})"
    return LockError.single(where, message, "correct hub.endpoint, or check for a proxy")


def _make_source(where: str, repo: str, revision: str, info: ModelInfo) -> LockedSource:
    files = []
    for sibling in info.siblings or ():
        if sibling.rfilename == ".gitattributes":
            continue
        sha256 = sibling.lfs.sha256 if sibling.lfs else None
        if sibling.size is None or (sha256 is None and sibling.blob_id is None):
            message = f"the hub lists no size or no hash for {one_line(sibling.rfilename)}"
            raise LockError.single(where, message, "set hub.endpoint to another hub")
        files.append(_make_file(where, sibling.rfilename, sibling.size, sha256, sibling.blob_id))
    if not info.sha or not files:
        raise LockError.single(where, "the hub lists no commit or no files", "check the repository")
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise _not_a_hub_error(where, f"the commit is {info.sha}")
    if len({file.path for file in files}) != len(files):
        raise _not_a_hub_error(where, "the hub lists a file twice")
    files.sort(key=lambda file: file.path)
    downloaded, left_out = split_files(where, files)
    if not downloaded:
        raise LockError.single(
            where, "the repository has no file to download", "check the repository"
        )
    return LockedSource(repo, revision, info.sha, downloaded, left_out)


def _make_file(
    where: str, path: object, size_bytes: object, sha256: object, git_sha1: object
) -> SourceFile:
    """Return a file that satisfies the rules of the download job."""
    digest = {"sha256": sha256} if sha256 else {"git_sha1": git_sha1}
    try:
        file = documents.read(FetchFile, {"path": path, "size_bytes": size_bytes, **digest})
    except DocumentError as error:
        raise _not_a_hub_error(where, str(error)) from error
    if file.size_bytes > _MAX_FILE_BYTES or not file.path.isprintable():
        raise _not_a_hub_error(
            where, f"the hub lists {file.path!r} with a size of {file.size_bytes} bytes"
        )
    return SourceFile(file.path, file.size_bytes, file.sha256, file.git_sha1)
