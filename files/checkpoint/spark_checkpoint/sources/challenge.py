"""The token that an image registry gives to whoever asks (distribution token specification)."""

from __future__ import annotations

import json
from urllib.parse import urlencode

from spark_contract.errors import HostToolError
from spark_contract.work.images import token_question
from urllib3 import PoolManager
from urllib3.exceptions import HTTPError

_LIMIT_BYTES = 1 << 20


def token_for(challenge: str, pool: PoolManager, scheme: str) -> str | None:
    """Return a token of the place that a challenge names; ``None`` where it gives none.

    Args:
        challenge: the header of an answer 401.
        pool: how that place is asked.
        scheme: of the registry; where that was https, the token comes over https, too.
    """
    question = token_question(challenge, ("https", scheme))
    if question is None:
        return None
    url = f"{question[0]}?{urlencode(question[1])}"
    try:
        answer = pool.request("GET", url, redirect=False, retries=False, preload_content=False)
        told = json.loads(answer.read(_LIMIT_BYTES)) if answer.status == 200 else {}
    except (HTTPError, HostToolError, OSError, ValueError):
        return None
    token = told.get("token") or told.get("access_token") if isinstance(told, dict) else None
    return token if isinstance(token, str) and token.isprintable() and " " not in token else None
