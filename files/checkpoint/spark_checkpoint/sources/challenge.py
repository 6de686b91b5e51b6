"""The token that an image registry gives to whoever asks (distribution token specification)."""

from __future__ import annotations

import json
from urllib.parse import urlencode

from spark_contract.errors import HostToolError
from spark_contract.work.fetching import Wire
from spark_contract.work.images import token_question
from urllib3 import BaseHTTPResponse, PoolManager
from urllib3.exceptions import HTTPError

from spark_checkpoint.sources.leash import pieces
from spark_checkpoint.sources.pacing import Again

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
