"""What a gateway lets through: each way by method and path, and what the engine gets of it.

The engine never sees the path as a client wrote it. nginx chooses a way by the path in its plain
form and would forward the one that was sent; so each way names what is forwarded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from spark_contract import release

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
    def takes_name(self) -> bool:
        """Return whether the body of such a request names a model."""
        return self.methods == "POST" and not self.named

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
    Way("POST", release.CHAT),
    Way("POST", release.COMPLETIONS),
    Way("POST", release.RESPONSES),
    Way("GET", f"{release.RESPONSES}/", _ANSWER),
    Way("POST", f"{release.RESPONSES}/", _ANSWER, "/cancel"),
    Way("POST", release.MESSAGES),
    Way("POST", release.COUNT_TOKENS),
    Way("POST", release.EMBEDDINGS),
    Way("POST", release.RERANK),
    Way("POST", release.SCORE),
    # The engine has these two without the version in front.
    Way("POST", release.CLASSIFY, engine="/classify"),
    Way("POST", release.POOLING, engine="/pooling"),
    Way("GET", release.MODELS),
    Way("GET", f"{release.MODELS}/", _MODEL),
)


def locations(target_of: Callable[[str], Target], named: Mapping[str, Target]) -> str:
    """Return the part of the configuration that lets requests with a key through.

    Args:
        target_of: which engine answers a path.
        named: the engines among which the name of a model chooses, by service; none: the path does.
    """
    if not named:
        found = [_outside(way, *_passed(way, target_of(way.path))) for way in WAYS]
    else:
        found = [_outside(way, *_chosen(way, target_of(way.path))) for way in WAYS]
        found += _CHOOSING
        found += [
            _location(
                replace(way, path=f"/engine/{service}{way.path}").location, "internal;", *passed
            )
            for service, target in named.items()
            for way in WAYS
            if way.takes_name or way.path.startswith(release.MODELS)
            for passed in (_passed(way, target),)
        ]
    return "\n\n        ".join(found)


# What names.js is asked for. It reads a body that does not fit into memory by the name of its file,
# which only such a one has: others are gone from the disk when their last reader is.
_CHOOSING = (
    "location /by-name/ { internal; js_content names.choose; }",
    "location /by-name-large/ "
    "{ internal; client_body_in_file_only clean; js_content names.choose; }",
)


def _chosen(way: Way, own: Target) -> tuple[str, ...]:
    if way.takes_name:
        large = f"if ($spark_large) {{ rewrite ^ /by-name-large{way.path} last; }}"
        return large, f"rewrite ^ /by-name{way.path} last;"
    if way.path.startswith(release.MODELS):
        if way.named:
            return ("js_content names.one;",)
        return "subrequest_output_buffer_size 256k;", "js_content names.all;"
    return _passed(way, own)


def _passed(way: Way, target: Target) -> tuple[str, ...]:
    passed = f"proxy_pass http://{target.upstream}{way.forwarded}$is_args$args;"
    return target.when_open, passed


def _outside(way: Way, *lines: str) -> str:
    return _location(
        way.location,
        f"if ($request_method !~ ^({way.methods})$) {{ rewrite ^ /refused/method last; }}",
        "if ($spark_key = 0) { rewrite ^ /refused/key last; }",
        *lines,
    )


def _location(place: str, *lines: str) -> str:
    inside = "".join(f"            {line}\n" for line in lines)
    return f"location {place} {{\n{inside}        }}"
