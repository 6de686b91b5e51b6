"""The allow-list of the gateway: methods and paths that reach the engine.

The engine never gets the path that a client sent: nginx matches the normalised path but would
forward the original, so each route names the path to forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from spark_contract import release

_RESPONSE = "(?<id>resp_[A-Za-z0-9_-]+)"
_MODEL = "(?<id>[A-Za-z0-9][A-Za-z0-9._:-]*)"


@dataclass(frozen=True, slots=True)
class Target:
    """The engine that answers."""

    service: str
    upstream: str
    when_open: str  # the directive that refuses requests while traffic is closed


@dataclass(frozen=True, slots=True)
class Route:
    """An allowed method and path, or with ``pattern`` all paths ``path`` + match + ``end``."""

    method: str
    path: str
    pattern: str = ""  # with a group called `id`
    end: str = ""
    engine: str = ""  # the engine's path, if it differs

    @property
    def takes_name(self) -> bool:
        """Whether the body of a request names a model."""
        return self.method == "POST" and not self.pattern

    @property
    def location(self) -> str:
        if not self.pattern:
            return f"= {self.path}"
        return f'~ "^{self.path}{self.pattern}{self.end}$"'

    @property
    def forwarded(self) -> str:
        if self.engine:
            return self.engine
        return f"{self.path}$id{self.end}" if self.pattern else self.path


ROUTES = (
    Route("POST", release.CHAT),
    Route("POST", release.COMPLETIONS),
    Route("POST", release.RESPONSES),
    Route("GET", f"{release.RESPONSES}/", _RESPONSE),
    Route("POST", f"{release.RESPONSES}/", _RESPONSE, "/cancel"),
    Route("POST", release.MESSAGES),
    Route("POST", release.COUNT_TOKENS),
    Route("POST", release.EMBEDDINGS),
    Route("POST", release.RERANK),
    Route("POST", release.SCORE),
    # The engine serves these two without the version prefix.
    Route("POST", release.CLASSIFY, engine="/classify"),
    Route("POST", release.POOLING, engine="/pooling"),
    Route("GET", release.MODELS),
    Route("GET", f"{release.MODELS}/", _MODEL),
)

# names.js reads a body that does not fit into memory from a file, which only the second keeps.
_CHOOSERS = (
    "location /by-name/ { internal; js_content names.choose; }",
    "location /by-name-large/ "
    "{ internal; client_body_in_file_only clean; js_content names.choose; }",
)


def locations(target_of: Callable[[str], Target], named: Mapping[str, Target]) -> str:
    """Return the nginx locations for requests with a key.

    Args:
        target_of: returns the engine that answers a path.
        named: engines by service, if the model name in a request chooses the engine.
    """
    blocks = []
    for route in ROUTES:
        target = target_of(route.path)
        lines = _choose_by_name(route, target) if named else _forward(route, target)
        blocks.append(_public_location(route, lines))
    if named:
        blocks += _CHOOSERS
    for service, target in named.items():
        for route in ROUTES:
            if route.takes_name or route.path.startswith(release.MODELS):
                inner = replace(route, path=f"/engine/{service}{route.path}")
                blocks.append(_location(inner.location, "internal;", *_forward(route, target)))
    return "\n\n        ".join(blocks)


def _choose_by_name(route: Route, own: Target) -> tuple[str, ...]:
    if route.takes_name:
        large = f"if ($spark_large) {{ rewrite ^ /by-name-large{route.path} last; }}"
        return large, f"rewrite ^ /by-name{route.path} last;"
    if route.path.startswith(release.MODELS):
        if route.pattern:
            return ("js_content names.getModel;",)
        return "subrequest_output_buffer_size 256k;", "js_content names.listModels;"
    return _forward(route, own)


def _forward(route: Route, target: Target) -> tuple[str, ...]:
    return target.when_open, f"proxy_pass http://{target.upstream}{route.forwarded}$is_args$args;"


def _public_location(route: Route, lines: tuple[str, ...]) -> str:
    return _location(
        route.location,
        f"if ($request_method !~ ^({route.method})$) {{ rewrite ^ /refused/method last; }}",
        "if ($spark_key = 0) { rewrite ^ /refused/key last; }",
        *lines,
    )


def _location(match: str, *lines: str) -> str:
    body = "".join(f"            {line}\n" for line in lines)
    return f"location {match} {{\n{body}        }}"
