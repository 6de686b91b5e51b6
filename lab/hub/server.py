"""The hub's two HTTP servers: the hub, and a second host that serves large files.

As on the real hub, ``resolve`` redirects large files to signed, expiring links on another host,
which rejects the hub's token.
"""

import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from lab.hub.store import Commit, FileRecord, GatedError, NotFoundError, Store
from lab.webserver import LabHttpServer

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


def check_link(url: str, secret: bytes, now_s: float) -> str | None:
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


LINK_LIFETIME_S = 3600
_BLOCK_BYTES = 1 << 18


@dataclass(slots=True)
class Hub:
    store: Store
    cdn_url: str
    access_log: Path
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))


class FileHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub

    def do_GET(self) -> None:
        try:
            self.route(unquote(urlsplit(self.path).path))
        except NotFoundError as error:
            self.reject(HTTPStatus.NOT_FOUND, str(error), code=error.code)
        except GatedError as error:
            self.reject(HTTPStatus.UNAUTHORIZED, f"{error} is gated", code="GatedRepo")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_HEAD = do_POST = do_GET  # noqa: N815  # names of http.server

    def route(self, path: str) -> None:
        """Answer the request; each server defines it."""
        raise NotImplementedError

    @property
    def token(self) -> str | None:
        word, _, token = self.headers.get("Authorization", "").partition(" ")
        return token if word == "Bearer" else None

    def send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def reject(self, status: int, what: str, *, code: str = "") -> None:
        headers = {"X-Error-Message": what, "Content-Type": "application/json"}
        if code:
            headers["X-Error-Code"] = code
        self.send(status, json.dumps({"error": what}).encode(), headers)

    def send_file(self, record: FileRecord, headers: dict[str, str]) -> None:
        try:
            wanted_range = byte_range(self.headers.get("Range"), record.size_bytes)
        except ValueError:
            total = {"Content-Range": f"bytes */{record.size_bytes}"}
            self.send(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"", total)
            return
        start, end = wanted_range or (0, record.size_bytes - 1)
        self.send_response(206 if wanted_range else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        if wanted_range:
            self.send_header("Content-Range", f"bytes {start}-{end}/{record.size_bytes}")
        self.send_header("Content-Length", str(end - start + 1))
        self.end_headers()
        if self.command != "HEAD":
            with record.disk_path.open("rb") as file:
                file.seek(start)
                while (left := end + 1 - file.tell()) > 0:
                    self.wfile.write(file.read(min(_BLOCK_BYTES, left)))

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        line = {
            "at": round(time.time(), 3),
            "client": self.client_address[0],
            "method": self.command,
            "path": self.path,
            "range": self.headers.get("Range"),
            "status": int(code),
            "authorized": "Authorization" in self.headers,
        }
        with self.hub.access_log.open("a") as log:
            log.write(json.dumps(line) + "\n")


class HubHandler(FileHandler):
    def route(self, path: str) -> None:
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._api("/".join(parts[2:4]), parts[4:])
        elif parts[:3] == ["api", "resolve-cache", "models"] and len(parts) >= 7:
            commit = self._commit("/".join(parts[3:5]), parts[5])
            record = commit.file("/".join(parts[6:]))
            self.send_file(record, file_headers(commit, record))
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._resolve(self._commit("/".join(parts[:2]), parts[3]), "/".join(parts[4:]))
        else:
            self.reject(HTTPStatus.NOT_FOUND, f"no such page: {path}")

    def _commit(self, repo: str, revision: str | None) -> Commit:
        return self.hub.store.commit(repo, revision, self.token)

    def _api(self, repo: str, rest: list[str]) -> None:
        query = parse_qs(urlsplit(self.path).query)
        action = rest[0] if rest else "revision"
        commit = self._commit(repo, "/".join(rest[1:]) or None)
        actions: dict[str, Callable[[], object]] = {
            "revision": lambda: model_info(commit, blobs="blobs" in query),
            "tree": lambda: [tree_entry(record) for record in commit.files],
            "paths-info": lambda: self._paths_info(commit),
        }
        if action not in actions:
            self.reject(HTTPStatus.NOT_FOUND, f"no such page: {self.path}")
            return
        self.send_json(actions[action]())

    def _paths_info(self, commit: Commit) -> list[dict[str, object]]:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
        if "json" in self.headers.get("Content-Type", ""):
            wanted = json.loads(body)["paths"]
        else:
            wanted = parse_qs(body).get("paths", [])
        return [tree_entry(record) for record in commit.files if record.path in wanted]

    def _resolve(self, commit: Commit, path: str) -> None:
        record = commit.file(path)
        headers = file_headers(commit, record)
        if record.large:
            expires_at = int(time.time()) + LINK_LIFETIME_S
            link = signed_link(self.hub.cdn_url, record.sha256, self.hub.secret, expires_at)
            self.send(HTTPStatus.FOUND, b"", {**headers, "Location": link})
            return
        cached = f"/api/resolve-cache/models/{commit.repo}/{commit.sha}/{record.path}"
        self.send(HTTPStatus.TEMPORARY_REDIRECT, b"", {**headers, "Location": cached})


class CdnHandler(FileHandler):
    def route(self, path: str) -> None:
        if "Authorization" in self.headers:
            self.reject(HTTPStatus.BAD_REQUEST, "only one auth mechanism allowed: drop the token")
            return
        if problem := check_link(self.path, self.hub.secret, time.time()):
            self.reject(HTTPStatus.FORBIDDEN, problem)
            return
        record = self.hub.store.by_sha256(path.rpartition("/")[2])
        if record is None:
            self.reject(HTTPStatus.NOT_FOUND, "no such blob")
            return
        self.send_file(record, {"ETag": f'"{record.sha256}"', "Accept-Ranges": "bytes"})


def make_servers(hub: Hub, host: str, port: int, cdn_port: int) -> tuple[LabHttpServer, ...]:
    kinds = ((HubHandler, port), (CdnHandler, cdn_port))
    return tuple(
        LabHttpServer((host, bind), type(kind.__name__, (kind,), {"hub": hub}))
        for kind, bind in kinds
    )


@contextmanager
def running(store: Path, run_dir: Path) -> Iterator[str]:
    hub = Hub(Store(store), "", run_dir / "access.jsonl")
    servers = make_servers(hub, "127.0.0.1", 0, 0)
    address, hub.cdn_url = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield address
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def serve(store: Path, run_dir: Path, host: str, port: int, cdn_port: int) -> None:
    store.mkdir(parents=True, exist_ok=True)
    hub = Hub(Store(store), f"http://{host}:{cdn_port}", run_dir / "hub-access.jsonl")
    servers = make_servers(hub, host, port, cdn_port)
    for server in servers[1:]:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    servers[0].serve_forever()
