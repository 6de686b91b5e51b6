"""Pictures for the proofs: plain colours, one or several in a request."""

from __future__ import annotations

import base64
from typing import Any

from spark_contract.release import CHAT
from spark_host.check.questions import png
from spark_host.engine.client import Engine

from proofs.releases.colours import COLOURS, SEVERAL
from proofs.releases.server import Server

DOCUMENTS = (
    ("red", "blue"),
    ("blue", "red"),
    ("green", "yellow", "black"),
    ("white", "red", "green"),
    ("black", "black"),
    ("yellow", "blue", "white"),
)
TIMEOUT_S = 60.0


def documents(server: Server, model: str) -> list[dict[str, Any]]:
    found = []
    for names in DOCUMENTS:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": parts(names)}],
            "max_tokens": 32,
            "temperature": 0,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        answer = Engine(server.socket).ask(CHAT, body, TIMEOUT_S)
        said = (answer["choices"][0]["message"].get("content") or "").strip()
        found.append({"wanted": " ".join(names), "said": said})
    return found


def parts(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the content of a message: the pictures, then the question."""
    urls = [base64.b64encode(png(COLOURS[name])).decode() for name in names]
    shown = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{url}"}} for url in urls
    ]
    return [*shown, {"type": "text", "text": SEVERAL}]
