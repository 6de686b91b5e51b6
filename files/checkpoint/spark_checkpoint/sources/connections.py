"""Keep-alive HTTP connections, one set per thread, through the proxy the environment names."""

from __future__ import annotations

import http.client
import ssl
import threading
import urllib.request
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port: what a token belongs to."""

    scheme: str
    host: str
    port: int


def origin_of(url: str) -> Origin:
    """Return the origin of an http(s) address; ``ValueError`` for anything else."""
    parts = urlsplit(url)
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"{url!r} is no http(s) address")
    return Origin(parts.scheme, parts.hostname.lower(), parts.port or DEFAULT_PORTS[parts.scheme])


class Connections:
    """Hands out connections; a connection never leaves its thread."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._local = threading.local()
        self._tls = ssl.create_default_context()
        self._proxies = urllib.request.getproxies()

    def request(self, url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Send GET and return the response; a stale kept-alive connection is replaced once."""
        origin, parts = origin_of(url), urlsplit(url)
        pool: dict[Origin, http.client.HTTPConnection] = self._pool()
        for fresh in (origin not in pool, True):
            if fresh:
                self.drop(url)
                pool[origin] = self._connect(origin)
            try:
                pool[origin].request("GET", self._target(origin, parts), headers=headers)
                return pool[origin].getresponse()
            except (http.client.BadStatusLine, ConnectionResetError, BrokenPipeError):
                self.drop(url)
                if fresh:
                    raise
            except (OSError, http.client.HTTPException):
                self.drop(url)
                raise
        raise AddressGoneError(url)

    def drop(self, url: str) -> None:
        """Close this thread's connection to the host of ``url``."""
        connection = self._pool().pop(origin_of(url), None)
        if connection is not None:
            connection.close()

    def _pool(self) -> dict[Origin, http.client.HTTPConnection]:
        if not hasattr(self._local, "pool"):
            self._local.pool = {}
        pool: dict[Origin, http.client.HTTPConnection] = self._local.pool
        return pool

    def _proxy(self, origin: Origin) -> SplitResult | None:
        proxy = self._proxies.get(origin.scheme)
        if not proxy or urllib.request.proxy_bypass(origin.host):
            return None
        return urlsplit(proxy if "://" in proxy else f"http://{proxy}")

    def _target(self, origin: Origin, parts: SplitResult) -> str:
        path = parts.path or "/"
        target = f"{path}?{parts.query}" if parts.query else path
        if origin.scheme == "http" and self._proxy(origin):
            return f"http://{parts.netloc}{target}"
        return target

    def _connect(self, origin: Origin) -> http.client.HTTPConnection:
        proxy = self._proxy(origin)
        host, port = origin.host, origin.port
        if proxy is not None:
            host, port = proxy.hostname or "", proxy.port or 3128
        if origin.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        connection = http.client.HTTPSConnection(
            host, port, timeout=self._timeout_s, context=self._tls
        )
        if proxy is not None:
            connection.set_tunnel(origin.host, origin.port)
        return connection


class AddressGoneError(OSError):
    """A server accepted connections but answered none of two requests."""
