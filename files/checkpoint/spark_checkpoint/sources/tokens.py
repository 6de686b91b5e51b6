"""Tokens for hubs and registries, from a file or from the token service of a registry."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlencode

from spark_contract.errors import HostToolError
from spark_contract.fetching import TransferOptions, parse_challenge
from urllib3 import PoolManager
from urllib3.exceptions import HTTPError

from spark_checkpoint.errors import InputError
from spark_checkpoint.sources import connections

_TOKEN_LIMIT_BYTES = 1 << 20


def read_token(file: str | None, *, required: bool) -> str | None:
    # Requests to a hub can be anonymous, but peers require their key.
    if file is None or not (required or Path(file).exists()):
        return None
    try:
        token = Path(file).read_text("utf-8").strip()
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise InputError(file, problem, "correct token_file") from error
    if not _is_token(token):
        raise InputError(file, "does not contain a token", "write only the token to this file")
    return token


def _is_token(text: str) -> bool:
    return bool(text) and text.isprintable() and " " not in text


def request_token(
    challenge: str, pool: PoolManager, scheme: str, transfer: TransferOptions
) -> str | None:
    """Return an anonymous token from the service in a 401 challenge, or None.

    ``scheme`` is that of the registry: with https the token service must use https as well.
    """
    token_service = parse_challenge(challenge, ("https", scheme))
    if token_service is None:
        return None
    service_url, parameters = token_service
    url = f"{service_url}?{urlencode(parameters)}"
    body = b""
    try:
        response = pool.request("GET", url, redirect=False, retries=False, preload_content=False)
        if response.status != 200:
            return None
        for piece in connections.read_body(response, _TOKEN_LIMIT_BYTES, transfer):
            body += piece
            if len(body) > _TOKEN_LIMIT_BYTES:
                return None
        document = json.loads(body)
    except (HostToolError, ValueError, connections.RetryableError, HTTPError, OSError):
        return None
    document = document if isinstance(document, dict) else {}
    token = document.get("token") or document.get("access_token")
    return token if isinstance(token, str) and _is_token(token) else None
