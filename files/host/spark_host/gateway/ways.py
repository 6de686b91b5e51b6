"""What a gateway lets through: each way by method and path, and what the engine gets of it.

The engine never sees the path as a client wrote it. nginx chooses a way by the path in its plain
form and would forward the one that was sent; so each way names what is forwarded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_ANSWER = "(?<id>resp_[A-Za-z0-9_-]+)"
_MODEL = "(?<id>[A-Za-z0-9][A-Za-z0-9._:-]*)"


@dataclass(frozen=True, slots=True)
class Target:
    """Which engine answers."""

    upstream: str  # as the configuration calls it
    when_open: str  # what sends a request away while traffic to it is closed


@dataclass(frozen=True, slots=True)
class Way:
    """Paths that are let through: one, or with ``named`` all that begin and end like it."""

    methods: str
    path: str
    named: str = ""  # a regular expression between path and end, its match called `id`
    end: str = ""
    engine: str = ""  # the engine's own path, where it is another one

    @property
    def location(self) -> str:
        """Return how nginx finds it."""
        if not self.named:
            return f"= {self.path}"
        return f'~ "^{self.path}{self.named}{self.end}$"'

    @property
    def forwarded(self) -> str:
        """Return the path that the engine gets."""
        if self.engine:
            return self.engine
        return f"{self.path}$id{self.end}" if self.named else self.path


WAYS = (
    Way("POST", "/v1/chat/completions"),
    Way("POST", "/v1/completions"),
    Way("POST", "/v1/responses"),
    Way("GET", "/v1/responses/", _ANSWER),
    Way("POST", "/v1/responses/", _ANSWER, "/cancel"),
    Way("POST", "/v1/messages"),
    Way("POST", "/v1/messages/count_tokens"),
    Way("POST", "/v1/embeddings"),
    Way("POST", "/v1/rerank"),
    Way("POST", "/v1/score"),
    # The engine has these two without the version in front.
    Way("POST", "/v1/classify", engine="/classify"),
    Way("POST", "/v1/pooling", engine="/pooling"),
    Way("GET", "/v1/models"),
    Way("GET", "/v1/models/", _MODEL),
)


def locations(target_of: Callable[[str], Target]) -> str:
    """Return the part of the configuration that lets requests with a key through.

    Args:
        target_of: which engine answers a path.
    """
    return "\n\n        ".join(_location(way, target_of(way.path)) for way in WAYS)


def _location(way: Way, target: Target) -> str:
    lines = (
        f"location {way.location} {{",
        f"    if ($request_method !~ ^({way.methods})$) {{ rewrite ^ /refused/method last; }}",
        "    if ($spark_key = 0) { rewrite ^ /refused/key last; }",
        f"    {target.when_open}",
        f"    proxy_pass http://{target.upstream}{way.forwarded}$is_args$args;",
        "}",
    )
    return "\n        ".join(lines)
