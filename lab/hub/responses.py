"""The hub's JSON answers and signed links, as pure functions."""

import hashlib
import hmac
from urllib.parse import parse_qs, urlencode, urlsplit

from lab.hub.store import Commit, FileRecord

_DATE = "2026-01-01T00:00:00.000Z"
_POINTER_SIZE_BYTES = 134  # about the size of an LFS pointer file


def model_info(commit: Commit, *, blobs: bool) -> dict[str, object]:
    org, _, _ = commit.repo.partition("/")
    return {
        "_id": commit.sha[:24],
        "id": commit.repo,
        "modelId": commit.repo,
        "author": org,
        "sha": commit.sha,
        "lastModified": _DATE,
        "createdAt": _DATE,
        "private": False,
        "gated": False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "siblings": [_sibling(record, blobs=blobs) for record in commit.files],
    }


def _sibling(record: FileRecord, *, blobs: bool) -> dict[str, object]:
    answer: dict[str, object] = {"rfilename": record.path}
    if blobs:
        answer |= {"size": record.size_bytes, "blobId": record.git_sha1}
        if record.large:
            answer["lfs"] = _lfs(record, "sha256")
    return answer


def _lfs(record: FileRecord, digest: str) -> dict[str, object]:
    size = {"size": record.size_bytes, "pointerSize": _POINTER_SIZE_BYTES}
    return {digest: record.sha256, **size}


def tree_entry(record: FileRecord) -> dict[str, object]:
    entry: dict[str, object] = {
        "type": "file",
        "path": record.path,
        "size": record.size_bytes,
        "oid": record.git_sha1,
    }
    if record.large:
        entry["lfs"] = _lfs(record, "oid")
    return entry


def file_headers(commit: Commit, record: FileRecord) -> dict[str, str]:
    headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{record.etag}"', "Accept-Ranges": "bytes"}
    if record.large:
        headers["X-Linked-Size"] = str(record.size_bytes)
        headers["X-Linked-Etag"] = f'"{record.sha256}"'
    return headers


def signed_link(base_url: str, sha256: str, secret: bytes, expires_at: int) -> str:
    query = urlencode({"Expires": expires_at, "Signature": _sign(sha256, secret, expires_at)})
    return f"{base_url}/blobs/{sha256}?{query}"


def link_refusal(url: str, secret: bytes, now_s: float) -> str | None:
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    try:
        expires_at = int(query["Expires"][0])
        signature = query["Signature"][0]
    except (KeyError, ValueError):
        return "the link is not signed"
    sha256 = parts.path.rpartition("/")[2]
    if not hmac.compare_digest(signature, _sign(sha256, secret, expires_at)):
        return "the signature does not match"
    return "the link has expired" if now_s > expires_at else None


def _sign(sha256: str, secret: bytes, expires_at: int) -> str:
    return hmac.new(secret, f"{sha256}:{expires_at}".encode(), hashlib.sha256).hexdigest()


def byte_range(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    if header is None or not header.startswith("bytes=") or "," in header:
        return None
    first, dash, last = header.removeprefix("bytes=").partition("-")
    if not dash or not (first + last).isdigit():
        return None
    if not first:
        start, end = max(0, size_bytes - int(last)), size_bytes - 1
    else:
        start, end = int(first), min(int(last) if last else size_bytes - 1, size_bytes - 1)
    if start > end:
        raise ValueError(f"{header} is outside {size_bytes} bytes")
    return start, end
