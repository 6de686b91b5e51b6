"""Query image registries for digests, sizes and entrypoints."""

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

from spark_contract.fetching import ARCHITECTURES, MANIFEST_TYPES, parse_challenge, parse_reference

from spark_deploy.config.errors import LockError, one_line, without_errno
from spark_deploy.lock.types import LockedImage

# A look-up reads a few megabytes at most.
LOOKUP_TIMEOUT_S = 300.0

T = TypeVar("T")


def run_with_timeout(timeout_s: float, function: Callable[[], T]) -> T:
    """Return a function's result; after ``timeout_s``, abandon the call and raise TimeoutError."""
    results: Queue[tuple[T | None, BaseException | None]] = Queue()

    def run() -> None:
        try:
            results.put((function(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=timeout_s)
    except Empty:
        raise TimeoutError(f"no complete response within {timeout_s:.0f} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str,
        headers: HTTPMessage, newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        before, after = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if after not in ("https", before):
            raise urllib.error.URLError(f"the registry redirects from {before} to {after}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


open_url = urllib.request.build_opener(_SafeRedirects).open


_TIMEOUT_S = 30
_MAX_BYTES = 4 << 20
_ACCEPT = ", ".join(MANIFEST_TYPES)
_MALFORMED = (HTTPException, ValueError, TypeError, KeyError, AttributeError, RecursionError)


class ImageNotFoundError(LockError):
    """The registry has no such image or tag."""


def look_up_image(
    reference: str, *, arch: str, insecure: Sequence[str] = (), engine: bool = False
) -> LockedImage:
    """Return digest and compressed size of an image for ``arch`` (as in ``uname -m``).

    The digest identifies the list of platforms, if there is one. If ``engine`` is set, the
    entrypoint must start vLLM.
    """
    try:
        return run_with_timeout(LOOKUP_TIMEOUT_S, lambda: _query(reference, arch, insecure, engine))
    except TimeoutError as error:
        fix = "check the registry and the network, then run the command again"
        raise LockError.single(f"image {reference}", str(error), fix) from error
    except _MALFORMED as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        message = f"the server does not respond like a registry ({reason})"
        fix = "correct the image reference, or check whether a proxy responds instead"
        raise LockError.single(f"image {reference}", message, fix) from error


def _query(reference: str, arch: str, insecure: Sequence[str], engine: bool) -> LockedImage:
    parsed = parse_reference(reference)
    client = _Client(parsed.base_url(plain=parsed.host in insecure), f"image {reference}")
    manifest, digest = client.manifest(parsed.version)
    if "manifests" in manifest:
        platform = {"os": "linux", "architecture": ARCHITECTURES.get(arch, arch)}
        digests = [
            entry["digest"]
            for entry in manifest["manifests"]
            if platform.items() <= entry.get("platform", {}).items()
        ]
        if not digests:
            message = f"has no linux/{platform['architecture']} image"
            fix = "choose a tag built for this architecture"
            raise LockError.single(f"image {reference}", message, fix)
        manifest, _ = client.manifest(digests[0])
    if engine:
        _check_entrypoint(client.configuration(manifest), reference)
    size = sum(int(layer["size"]) for layer in manifest.get("layers", ()))
    return LockedImage(reference, digest, size)


def _check_entrypoint(configuration: Mapping[str, Any], reference: str) -> None:
    entrypoint = " ".join(configuration["config"].get("Entrypoint") or ())
    if "vllm" not in entrypoint:
        actual = f"starts {entrypoint!r}" if entrypoint else "has no entrypoint"
        message = f"the image {actual}, but an engine image must start vLLM's server"
        fix = "use an image with the entrypoint `vllm serve`, such as vllm/vllm-openai"
        raise LockError.single(f"image {reference}", message, fix)


class _Client:
    """Reads a repository of a registry; requests a token if necessary."""

    def __init__(self, base_url: str, where: str) -> None:
        self._base_url = base_url
        self._where = where  # in errors
        self._token: str | None = None

    def manifest(self, version: str) -> tuple[dict[str, Any], str]:
        """Return the manifest of a tag or digest, and its digest."""
        body, headers = self._get(f"{self._base_url}/manifests/{version}")
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        expected_digests = [headers.get("Docker-Content-Digest", digest)]
        if version.startswith("sha256:"):
            expected_digests.append(version)
        return self._parse(body, digest, expected_digests), digest

    def configuration(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        expected = manifest["config"]["digest"]
        body, _ = self._get(f"{self._base_url}/blobs/{expected}")
        return self._parse(body, f"sha256:{hashlib.sha256(body).hexdigest()}", [expected])

    def _parse(self, body: bytes, digest: str, expected_digests: Sequence[str]) -> dict[str, Any]:
        for expected in expected_digests:
            if digest != expected:
                message = f"the registry's response does not match digest {one_line(expected)}"
                fix = "run the command again; if that fails, check for a proxy"
                raise LockError.single(self._where, message, fix)
        document: dict[str, Any] = json.loads(body)
        return document

    def _get(self, url: str) -> tuple[bytes, HTTPMessage]:
        request = urllib.request.Request(url, headers={"Accept": _ACCEPT})
        if self._token:  # not sent to redirect targets
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            with open_url(request, timeout=_TIMEOUT_S) as response:
                return _read_body(response), response.headers
        except urllib.error.HTTPError as error:
            if error.code != 401 or self._token:
                raise self._status_error(error) from error
            self._token = self._request_token(error.headers.get("WWW-Authenticate", ""))
            return self._get(url)
        except OSError as error:
            reason = without_errno(one_line(getattr(error, "reason", error)))
            message = f"the registry cannot be reached: {reason}"
            fix = "check the network; add the registry to registries.insecure if it uses plain HTTP"
            raise LockError.single(self._where, message, fix) from error

    def _request_token(self, challenge: str) -> str:
        token_service = parse_challenge(challenge, ("https",))
        if token_service is None:
            fix = "use a registry that requires no login"
            raise LockError.single(self._where, "the registry requires a login", fix)
        realm, parameters = token_service
        try:
            url = f"{realm}{urllib.parse.urlencode(parameters)}"
            with open_url(url, timeout=_TIMEOUT_S) as response:
                data = json.loads(_read_body(response))
        except OSError as error:
            reason = getattr(error, "reason", error)
            message = f"{one_line(realm[:-1])} returned no token: {one_line(reason)}"
            fix = "check the network, or use a registry that requires no login"
            raise LockError.single(self._where, message, fix) from error
        return str(data.get("token") or data.get("access_token"))

    def _status_error(self, error: urllib.error.HTTPError) -> LockError:
        if error.code == 404:
            fix = "correct the tag in images"
            return ImageNotFoundError.single(self._where, "no such image or tag", fix)
        message = f"the registry returned {error.code} {one_line(error.reason)}"
        return LockError.single(self._where, message, "run the command again later")


def _read_body(response: HTTPResponse) -> bytes:
    body = response.read(_MAX_BYTES + 1)
    if len(body) > _MAX_BYTES:
        raise ValueError(f"the response is longer than {_MAX_BYTES} bytes")
    if response.length:  # bytes still missing
        raise ValueError(f"the response ended {response.length} bytes early")
    return body
