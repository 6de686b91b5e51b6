"""Asks one address: connections, proxies, and a token that only the hub's own origin sees.

Connections, TLS and proxies are urllib3's.
"""

from __future__ import annotations

import json
import re
import ssl
import urllib.request
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlencode

from spark_contract.errors import HostToolError
from spark_contract.fetching import Wire, token_question
from urllib3 import BaseHTTPResponse, PoolManager, ProxyManager
from urllib3.connection import port_by_scheme
from urllib3.exceptions import HTTPError
from urllib3.util import make_headers, parse_url

from spark_checkpoint.errors import GateRefused, InputRefused, TransferFailed
from spark_checkpoint.progress import note
from spark_checkpoint.sources.pacing import POOLS, Again, pieces, put_back

_LIMIT_BYTES = 1 << 20


def token_for(challenge: str, pool: PoolManager, scheme: str, wire: Wire) -> str | None:
    """Return a token of the place that a challenge names; ``None`` where it gives none.

    Args:
        challenge: the header of an answer 401.
        pool: how that place is asked.
        scheme: of the registry; where that was https, the token comes over https, too.
        wire: how patient to be.
    """
    question = token_question(challenge, ("https", scheme))
    if question is None:
        return None
    url = f"{question[0]}?{urlencode(question[1])}"
    try:
        answer = pool.request("GET", url, redirect=False, retries=False, preload_content=False)
        told = json.loads(_body(answer, wire)) if answer.status == 200 else {}
    except (Again, HTTPError, HostToolError, OSError, ValueError):
        return None
    token = told.get("token") or told.get("access_token") if isinstance(told, dict) else None
    return token if isinstance(token, str) and token.isprintable() and " " not in token else None


def _body(answer: BaseHTTPResponse, wire: Wire) -> bytes:
    body = b""
    for piece in pieces(answer, _LIMIT_BYTES, wire):
        body += piece
        if len(body) > _LIMIT_BYTES:
            raise ValueError(f"longer than {_LIMIT_BYTES} bytes")
    return body


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


_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class RangeIgnored(TransferFailed):
    """The server sent the whole file although a part was asked for."""


def body_bytes(
    url: str,
    response: BaseHTTPResponse,
    begin: int,
    end: int,
    total_bytes: int | None,
    *,
    whole: bool,
) -> int:
    """Return how many bytes the answer must bring, or refuse an answer to another question."""
    fix = "use another source"
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise TransferFailed(url, f"answers with encoding {encoding}", fix)
    if response.status == 206 or not whole:
        first, last, total = content_range(url, response)
        if total_bytes is not None and total != total_bytes:
            raise GateRefused(url, f"is {total} bytes long, not {total_bytes}", "lock it again")
        if first != begin or last + 1 != min(end, total):
            raise TransferFailed(url, f"sends bytes {first}-{last} for {begin}-{end - 1}", fix)
        expected = last + 1 - first
    else:
        expected = end - begin
    announced = response.length_remaining
    if announced not in (None, expected):
        if whole:
            raise GateRefused(url, f"is {announced} bytes long, not {expected}", fix)
        raise TransferFailed(url, f"announces {announced} bytes for {expected}", fix)
    return expected


def content_range(url: str, response: BaseHTTPResponse) -> tuple[int, int, int]:
    """Return first byte, last byte and file size an answer with a part states."""
    if response.status != 206:
        raise RangeIgnored(
            url, "sends the whole file where a range was asked for", "use another source"
        )
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
    if not match:
        raise TransferFailed(
            url, "sends a part without a readable Content-Range", "use another source"
        )
    return int(match[1]), int(match[2]), int(match[3])
