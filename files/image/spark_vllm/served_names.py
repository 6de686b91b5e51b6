"""ASGI middleware for vLLM's API server: request defaults for each served model name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from spark_vllm import REQUEST_DEFAULTS


class RequestDefaults:
    """Adds defaults to a request; the request's values win."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._defaults: dict[str, dict[str, Any]] = json.loads(os.environ[REQUEST_DEFAULTS])

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        parts, more = [], True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # The client disconnected.
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = add_defaults(b"".join(parts), self._defaults)
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            return messages.pop() if messages else await receive()

        await self._app({**scope, "headers": headers}, replay, send)


def add_defaults(body: bytes, defaults: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Add the defaults of the requested model name; values in the request win."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return body
    name = request.get("model") if isinstance(request, dict) else None
    if not isinstance(name, str) or name not in defaults:
        return body
    requested = request.get("chat_template_kwargs")
    merged = {**defaults[name], **request}
    if isinstance(requested, dict):
        template = defaults[name].get("chat_template_kwargs", {})
        merged["chat_template_kwargs"] = {**template, **requested}
    return json.dumps(merged).encode()
