"""How a client reaches a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Connection:
    host: str
    base_url: str
    port: int
    users: str
    model: str
    names: tuple[str, ...]
    key_path: str
    read_key: str
    tunnel: str | None  # a command that forwards a local port to the host
    ca: str | None  # a CA file for clients
    container: str | None  # base URL inside containers of the host
    example: str
    context_tokens: int | None = None  # of the longest request, if known
    task: str = "chat"
