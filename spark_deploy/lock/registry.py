"""Query image registries for digests, sizes and entrypoints."""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException, HTTPMessage, HTTPResponse
from queue import Empty, Queue
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from spark_contract.fetching import (
    ARCHITECTURES,
    MANIFEST_TYPES,
    parse_reference,
    token_question,
)

from spark_deploy.config.errors import LockError
from spark_deploy.config.printable import in_words, one_line
from spark_deploy.lock.types import LockedImage

# A look-up reads a few megabytes at most: a line of 15 KB/s brings them by then.
LIMIT_S = 300.0

T = TypeVar("T")


def within(limit_s: float, ask: Callable[[], T]) -> T:
    """Return the result of ``ask``; raise TimeoutError after ``limit_s``, leaving its thread."""
    results: Queue[tuple[T | None, BaseException | None]] = Queue()

    def run() -> None:
        try:
            results.put((ask(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = results.get(timeout=limit_s)
    except Empty:
        raise TimeoutError(f"no whole answer within {limit_s:.0f} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


class _PlainRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to https, and from http to http."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str,
        headers: HTTPMessage, newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        before, after = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if after not in ("https", before):
            raise urllib.error.URLError(f"it redirects from {before} to {after}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


opened = urllib.request.build_opener(_PlainRedirects).open


_TIMEOUT_S = 30
_MAX_BYTES = 4 << 20
_ACCEPT = ", ".join(MANIFEST_TYPES)
_ODD_ANSWERS = (HTTPException, ValueError, TypeError, KeyError, AttributeError, RecursionError)


class ImageNotFound(LockError):  # noqa: N818 - named after what happened
    """The registry has no such image or tag."""


def look_up(
    text: str, *, arch: str, insecure: Sequence[str] = (), engine: bool = False
) -> LockedImage:
    """Return digest and compressed size of an image for hosts of ``arch`` (as ``uname -m``).

    The digest is that of the platform list, if any, so a lock serves every architecture; the
    size is that of ``arch``. For an ``engine`` the entrypoint must start vLLM.
    """
    try:
        return within(LIMIT_S, lambda: _ask(text, arch, insecure, engine))
    except TimeoutError as error:
        fix = "check the registry and the network, then run again"
        raise LockError.one(f"image {text}", f"the registry gives {error}", fix) from error
    except _ODD_ANSWERS as error:
        why = one_line(f"{type(error).__name__}: {error}")
        what = f"the server does not answer like a registry ({why})"
        fix = "correct the image's address; a proxy may have answered in the registry's place"
        raise LockError.one(f"image {text}", what, fix) from error


def _ask(text: str, arch: str, insecure: Sequence[str], engine: bool) -> LockedImage:
    reference = parse_reference(text)
    client = _Client(reference.base_url(plain=reference.host in insecure), text)
    manifest, digest = client.manifest(reference.version)
    if "manifests" in manifest:
        platform = {"os": "linux", "architecture": ARCHITECTURES.get(arch, arch)}
        entries = manifest["manifests"]
        entry = next(
            (e for e in entries if platform.items() <= e.get("platform", {}).items()), None
        )
        if entry is None:
            what = f"has no linux/{platform['architecture']} image"
            raise LockError.one(f"image {text}", what, "choose a tag built for this architecture")
        manifest, _ = client.manifest(entry["digest"])
    if engine:
        _must_start_vllm(client.configuration(manifest), text)
    size = sum(int(layer["size"]) for layer in manifest.get("layers", ()))
    return LockedImage(text, digest, size)


def _must_start_vllm(configuration: Mapping[str, Any], text: str) -> None:
    words = " ".join(configuration["config"].get("Entrypoint") or ())
    if "vllm" not in words:
        what = f"starts {words!r}, not vLLM's server" if words else "has no entrypoint"
        fix = "name an image with the entrypoint `vllm serve`, such as vllm/vllm-openai"
        raise LockError.one(f"image {text}", f"is not an engine: it {what}", fix)


class _Client:
    """Reads a repository of a registry, with a token."""

    def __init__(self, base: str, shown: str) -> None:
        self._base = base
        self._shown = shown
        self._token: str | None = None

    def manifest(self, version: str) -> tuple[dict[str, Any], str]:
        body, headers = self._get(f"{self._base}/manifests/{version}")
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        claimed = headers.get("Docker-Content-Digest", digest)
        if claimed != digest or (version.startswith("sha256:") and version != digest):
            what = f"the registry sent other bytes than {one_line(claimed)}"
            raise LockError.one(f"image {self._shown}", what, "try again; check for a proxy")
        data: dict[str, Any] = json.loads(body)
        return data, digest

    def configuration(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        digest = manifest["config"]["digest"]
        body, _ = self._get(f"{self._base}/blobs/{digest}")
        if f"sha256:{hashlib.sha256(body).hexdigest()}" != digest:
            what = f"the registry sent other bytes than {one_line(digest)}"
            raise LockError.one(f"image {self._shown}", what, "try again; check for a proxy")
        data: dict[str, Any] = json.loads(body)
        return data

    def _get(self, url: str) -> tuple[bytes, HTTPMessage]:
        request = urllib.request.Request(url, headers={"Accept": _ACCEPT})
        if self._token:  # not to a content host
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            with opened(request, timeout=_TIMEOUT_S) as answer:
                return _body(answer), answer.headers
        except urllib.error.HTTPError as error:
            if error.code != 401 or self._token:
                raise self._refused(error) from error
            self._token = self._ask_token(error.headers.get("WWW-Authenticate", ""))
            return self._get(url)
        except OSError as error:
            why = in_words(one_line(getattr(error, "reason", error)))
            what = f"the registry cannot be reached: {why}"
            fix = "check the network; a registry over plain HTTP belongs in registries.insecure"
            raise LockError.one(f"image {self._shown}", what, fix) from error

    def _ask_token(self, challenge: str) -> str:
        question = token_question(challenge, ("https",))
        if question is None:
            fix = "use a registry that can be read without a login"
            raise LockError.one(f"image {self._shown}", "the registry wants a login", fix)
        realm, fields = question
        try:
            url = f"{realm}?{urllib.parse.urlencode(fields)}"
            with opened(url, timeout=_TIMEOUT_S) as answer:
                data = json.loads(_body(answer))
        except OSError as error:
            why = getattr(error, "reason", error)
            what = f"{one_line(realm)} gives no token: {one_line(why)}"
            fix = "use an image that can be read without a login, or check the network"
            raise LockError.one(f"image {self._shown}", what, fix) from error
        return str(data.get("token") or data.get("access_token"))

    def _refused(self, error: urllib.error.HTTPError) -> LockError:
        if error.code == 404:
            fix = "correct the tag under images"
            return ImageNotFound.one(f"image {self._shown}", "no such image or tag", fix)
        what = f"the registry answered {error.code} {one_line(error.reason)}"
        return LockError.one(f"image {self._shown}", what, "try again later")


def _body(answer: HTTPResponse) -> bytes:
    body = answer.read(_MAX_BYTES + 1)
    if len(body) > _MAX_BYTES:
        raise ValueError(f"longer than {_MAX_BYTES} bytes")
    if answer.length:  # fewer than Content-Length
        raise ValueError(f"broke off with {answer.length} bytes missing")
    return body
