"""Asks one address: connections, proxies, and a token that only the hub's own origin sees.

Connections, TLS and proxies are urllib3's.
"""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from spark_contract.work.fetching import Wire
from urllib3 import BaseHTTPResponse, PoolManager, ProxyManager
from urllib3.connection import port_by_scheme
from urllib3.util import make_headers, parse_url

from spark_checkpoint.errors import InputRefused
from spark_checkpoint.progress import note
from spark_checkpoint.sources.challenge import token_for
from spark_checkpoint.sources.leash import POOLS, put_back


class Connections:
    """What answers one request; an answer that redirects is an answer like others."""

    def __init__(self, wire: Wire, trusted_urls: tuple[str, ...], *, direct: bool, accept: str):
        """Read the token, and refuse addresses that are none; see ``Transport``."""
        self._accept, self._wire = accept, wire
        self._pools = _pools(wire, {} if direct else urllib.request.getproxies())
        self._token = _read_token(wire.token_file, required=direct)
        try:
            self._trusted = frozenset(origin_of(url) for url in trusted_urls)
        except ValueError as error:
            raise InputRefused("sources", str(error), "correct the address") from error

    def trusts(self, url: str) -> bool:
        """Return whether the token may go there."""
        return origin_of(url) in self._trusted

    def ask(self, address: str, byte_range: tuple[int, int] | None) -> BaseHTTPResponse:
        """Send one request, and once more when the hub wants a token of its registry for it."""
        headers = {
            "Accept": self._accept,
            "Accept-Encoding": "identity",
            "User-Agent": "spark-checkpoint",
        }
        if byte_range is not None:
            headers["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"
        token = self._token if self.trusts(address) else None
        response = self._send(address, headers, token)
        if response.status != 401 or not self.trusts(address):
            return response
        challenge = response.headers.get("WWW-Authenticate", "")
        scheme = origin_of(address)[0]
        pool = self._pool(parse_url(address).host or "", scheme)
        new = token_for(challenge, pool, scheme, self._wire) if challenge else None
        if new is None and token is None:
            return response
        put_back(response, self._wire)
        response = self._send(address, headers, new)
        if new is not None:
            self._token = new  # good for some minutes, then there is another challenge
        elif response.status < 400:
            note(f"{address}: the hub refuses the token; going on without it")
            self._token = None
        return response

    def _send(
        self, address: str, headers: Mapping[str, str], token: str | None
    ) -> BaseHTTPResponse:
        origin = origin_of(address)
        login = {"Authorization": f"Bearer {token}"} if token else {}
        # How much arrived is counted here, so that an early end is told in bytes.
        return self._pool(origin[1], origin[0]).request(
            "GET", address, headers={**headers, **login}, redirect=False, retries=False,
            preload_content=False, enforce_content_length=False,
        )  # fmt: skip

    def _pool(self, host: str, scheme: str) -> PoolManager:
        if urllib.request.proxy_bypass(host):
            return self._pools[""]
        return self._pools.get(scheme, self._pools[""])


def origin_of(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port, what a token belongs to; ``ValueError`` if not http(s)."""
    parts = parse_url(url)
    if parts.scheme not in port_by_scheme or not parts.host:
        raise ValueError(f"{url!r} is no http(s) address")
    return parts.scheme, parts.host, parts.port or port_by_scheme[parts.scheme]


@cache
def _tls() -> ssl.SSLContext:
    """Return the trusted certificates, which take a tenth of a second to read."""
    return ssl.create_default_context()


def _pools(wire: Wire, proxies_known: Mapping[str, str]) -> dict[str, PoolManager]:
    """Return the connections by scheme where the environment names a proxy; "" goes directly."""
    tls = _tls()
    proxies = {
        scheme: proxy if "://" in proxy else f"http://{proxy}"
        for scheme, proxy in proxies_known.items()
        if scheme in port_by_scheme
    }
    pools = {
        scheme: ProxyManager(
            proxy,
            proxy_headers=_login(proxy),
            maxsize=wire.parallel,
            timeout=wire.timeout_s,
            ssl_context=tls,
        )
        for scheme, proxy in proxies.items()
    }
    direct = PoolManager(maxsize=wire.parallel, timeout=wire.timeout_s, ssl_context=tls)
    known: dict[str, PoolManager] = {"": direct, **pools}
    for pool in known.values():
        pool.pool_classes_by_scheme = POOLS
    return known


def _login(proxy: str) -> dict[str, str]:
    """Return the header that a proxy with a login in its address is asked with."""
    login = parse_url(proxy).auth
    return dict(make_headers(proxy_basic_auth=unquote(login))) if login else {}


def _read_token(file: str | None, *, required: bool) -> str | None:
    # A job whose token was removed asks a hub without; a peer answers nobody without its key.
    if file is None or not (required or Path(file).exists()):
        return None
    path = Path(file)
    try:
        token = path.read_text("utf-8").strip()
    except OSError as error:
        raise InputRefused(
            str(path), f"token cannot be read ({error.strerror})", "check token_file"
        ) from error
    if not token or not token.isprintable() or " " in token:
        raise InputRefused(str(path), "holds no token", "write the token alone into it")
    return token
