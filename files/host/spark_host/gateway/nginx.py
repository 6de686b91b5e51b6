"""The nginx configurations of gateways and of peer downloads.

nginx matches the normalized path, but forwards the original path unless a route sets the path.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from spark_contract import files, release
from spark_contract.fetching import SHARE_SETTINGS, Share, SharedTree, partial_tree
from spark_contract.gateway import Gateway
from spark_contract.paths import Paths, job_dir
from spark_contract.tool import HostToolError

from spark_host.gateway import listeners
from spark_host.gateway.listeners import Listener

_RESPONSE = "(?<id>resp_[A-Za-z0-9_-]+)"
_MODEL = "(?<id>[A-Za-z0-9][A-Za-z0-9._:-]*)"


@dataclass(frozen=True, slots=True)
class Route:
    """An allowed method and path; a ``pattern`` allows all paths ``path`` + match + ``suffix``."""

    method: str
    path: str
    pattern: str = ""
    suffix: str = ""
    engine: str = ""  # the engine's path, if it differs
    output_fields: tuple[str, ...] = ()  # body fields that limit the output

    @property
    def takes_name(self) -> bool:
        return self.method == "POST" and not self.pattern

    @property
    def location(self) -> str:
        if not self.pattern:
            return f"= {self.path}"
        return f'~ "^{self.path}{self.pattern}{self.suffix}$"'

    @property
    def upstream_path(self) -> str:
        if self.engine:
            return self.engine
        return f"{self.path}$id{self.suffix}" if self.pattern else self.path


ROUTES = (
    Route("POST", release.CHAT, output_fields=("max_tokens", "max_completion_tokens")),
    Route("POST", release.COMPLETIONS, output_fields=("max_tokens",)),
    Route("POST", release.RESPONSES, output_fields=("max_output_tokens",)),
    Route("GET", f"{release.RESPONSES}/", _RESPONSE),
    Route("POST", f"{release.RESPONSES}/", _RESPONSE, "/cancel"),
    Route("POST", release.MESSAGES, output_fields=("max_tokens",)),
    Route("POST", release.COUNT_TOKENS),
    Route("POST", release.EMBEDDINGS),
    Route("POST", release.RERANK),
    Route("POST", release.SCORE),
    # The engine's paths have no version prefix.
    Route("POST", release.CLASSIFY, engine="/classify"),
    Route("POST", release.POOLING, engine="/pooling"),
    Route("GET", release.MODELS),
    Route("GET", f"{release.MODELS}/", _MODEL),
)


def _render_script_locations(name: str, function: str) -> tuple[str, str]:
    """Return two locations; the second stores a large body in a file for the script."""
    content = f"internal; js_content {function};"
    large = f"location /{name}-large/ {{ client_body_in_file_only clean; {content} }}"
    return f"location /{name}/ {{ {content} }}", large


def _render_routes(settings: Gateway, paths: Paths) -> str:
    blocks = []
    limits_output = any(key.max_output_tokens for key in (settings.keys or {}).values())
    for route in ROUTES:
        service = settings.routes.get(route.path, settings.service)
        lines = _render_choice_by_name(route) if settings.names else ()
        lines = lines or _render_forward(route, service, settings, paths)
        limit_output: tuple[str, ...] = ()
        if limits_output and route.output_fields:
            blocks.append(_render_location(f"= /limited{route.path}", "internal;", *lines))
            rewrite = f"rewrite ^ $spark_limit_output{route.path} last;"
            limit_output = (f"if ($spark_limit_output) {{ {rewrite} }}",)
        blocks.append(
            _render_location(
                route.location,
                f"if ($request_method !~ ^({route.method})$) {{ rewrite ^ /refused/method last; }}",
                "if ($spark_key = 0) { rewrite ^ /refused/key last; }",
                *_reject_large_bodies(settings),
                *limit_output,
                *lines,
            )
        )
    blocks += _render_script_locations("by-name", "names.choose") if settings.names else ()
    blocks += _render_script_locations("limit-output", "keys.limitOutput") if limits_output else ()
    for service in settings.names or ():
        for route in ROUTES:
            if route.takes_name or route.path.startswith(release.MODELS):
                internal = replace(route, path=f"/engine/{service}{route.path}")
                lines = _render_forward(route, service, settings, paths)
                blocks.append(_render_location(internal.location, "internal;", *lines))
    return "\n\n        ".join(blocks)


def _render_choice_by_name(route: Route) -> tuple[str, ...]:
    """Return directives that choose the engine by model name, or none for a route without one."""
    if route.takes_name:
        large = f"if ($spark_large) {{ rewrite ^ /by-name-large{route.path} last; }}"
        return large, f"rewrite ^ /by-name{route.path} last;"
    if not route.path.startswith(release.MODELS):
        return ()
    if route.pattern:
        return ("js_content names.getModel;",)
    return "subrequest_output_buffer_size 256k;", "js_content names.listModels;"


def _render_forward(route: Route, service: str, settings: Gateway, paths: Paths) -> tuple[str, ...]:
    """Return directives that forward to the engine, or to the relay while the engine is stopped."""
    upstream, path = _upstream_name(service, settings), f"{route.upstream_path}$is_args$args"
    can_start = route.takes_name or route.path.startswith(release.MODELS)
    if service in (settings.on_request or {}) and can_start:
        return (
            f"set $spark_engine {upstream};",
            f"if (!-f {paths.traffic(service)}) {{ set $spark_engine waiting-{service}; }}",
            f"proxy_pass http://$spark_engine{path};",
        )
    return _reject_if_closed(service, paths), f"proxy_pass http://{upstream}{path};"


def _upstream_name(service: str, settings: Gateway) -> str:
    return "engine" if service == settings.service else f"engine-{service}"


def _reject_if_closed(service: str, paths: Paths) -> str:
    return f"if (!-f {paths.traffic(service)}) {{ rewrite ^ /refused/closed last; }}"


def _reject_large_bodies(settings: Gateway) -> tuple[str, ...]:
    """Return a directive only if there are named keys, whose limits may be smaller."""
    line = "if ($spark_body_too_large) { rewrite ^ /refused/body last; }"
    return (line,) if settings.keys else ()


def _render_location(match: str, *lines: str) -> str:
    body = "".join(f"            {line}\n" for line in lines)
    return f"location {match} {{\n{body}        }}"


SCRIPT = "names.js"
LARGE_BODIES = 32
_MODULE = "usr/lib/nginx/modules/ngx_http_js_module.so"
# Paths that need no escaping between quotes.
_PLAIN = re.compile(r"/[A-Za-z0-9._/ +@,:=-]*\Z")


def find_program(paths: Paths) -> str:
    for name in ("usr/sbin/nginx", "usr/local/sbin/nginx", "usr/bin/nginx"):
        if os.access(paths.root / name, os.X_OK):
            return str(paths.root / name)
    raise HostToolError("nginx", "not installed", "run the deploy again")


def render_template(template: str, values: Mapping[str, str]) -> str:
    text = resources.files("spark_host.gateway").joinpath(f"templates/{template}").read_text()
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], text)


def quote_path(path: Path, suffix: str = "") -> str:
    if not _PLAIN.match(str(path)):
        fix = "use only letters, digits, spaces and ._/+@,:=- in the path"
        raise HostToolError("share", f"cannot share {path}", fix)
    return f'"{path}{suffix}"'


def render_key_maps(key: str, default: str = "0") -> str:
    """Return nginx maps that set ``$spark_key`` to 1 if the key matches (case-sensitive)."""
    escaped = re.sub(r"([.+/=~-])", r"\\\1", key)
    return (
        f'map $http_x_api_key $spark_header_key {{ default {default}; "~^{escaped}$" 1; }}\n'
        "map $http_authorization $spark_key "
        f'{{ default $spark_header_key; "~^[Bb]earer +{escaped}$" 1; }}\n'
    )


def body_folder(settings: Gateway, paths: Paths) -> Path:
    return paths.gateway_bodies(settings.service) / "body"


def render_config(settings: Gateway, paths: Paths) -> str:
    run = paths.gateway_run(settings.service)
    names = settings.names or {}
    listening = listeners.planned_listeners(settings).listeners
    balancer, balancer_socket = _render_replicas(settings, listening, paths)
    upstreams = (
        f"upstream {_upstream_name(service, settings)} {{\n"
        f"        server unix:{paths.engine_socket(service)} max_fails=0;\n"
        "    }"
        for service in dict.fromkeys((settings.service, *settings.routes.values(), *names))
    )
    waiting = (
        f"upstream waiting-{service} {{ server unix:{paths.waiting_socket(service)} max_fails=0; }}"
        for service in settings.on_request or ()
    )
    module = paths.root / _MODULE
    needs_module = names or settings.keys
    if needs_module and not module.is_file():
        fix = "run the deploy again, or run `apt-get install libnginx-mod-http-js`"
        raise HostToolError("nginx", f"the JavaScript module {module} is missing", fix)
    values = {
        "USER": settings.user,
        # Debian's "nobody" is in the group "nogroup".
        "GROUP": "nogroup" if settings.user == "nobody" else settings.user,
        "RUN": str(run),
        "BODIES": str(body_folder(settings, paths)),
        "LARGE_BODIES": str(LARGE_BODIES),
        "MAX_BODY_BYTES": str(settings.max_body_bytes),
        "UPSTREAMS": "\n    ".join([*upstreams, *waiting]),
        "JOURNAL": str(paths.below("/run/systemd/journal/dev-log")),
        "LISTEN": "\n        ".join([*map(_render_listen, listening), *balancer_socket]),
        "TLS": _render_tls(settings, paths),
        "OPEN_ONLY": _reject_if_closed(settings.service, paths),
        "MODULE": f"load_module {module};" if needs_module else "",
        "BY_NAME": f"js_import names from {run / SCRIPT};" if names else "",
        "ROUTES": _render_routes(settings, paths),
        "LIMITS": _render_limits(settings),
        "REPLICAS": balancer,
    }
    return render_template("gateway.conf", values)


def render_script(settings: Gateway, paths: Paths) -> str:
    names_by_service = settings.names or {}
    own_service_first = {settings.service: names_by_service[settings.service]} | names_by_service
    services = [
        {
            "service": service,
            "traffic": str(paths.traffic(service)),
            "names": list(names),
            "onRequest": service in (settings.on_request or {}),
        }
        for service, names in own_service_first.items()
    ]
    return combine_script(SCRIPT, {"SERVICES": services, "ROUTES": settings.routes})


def combine_script(name: str, constants: Mapping[str, Any]) -> str:
    lines = [f"const {key} = {json.dumps(value)};\n" for key, value in constants.items()]
    return "".join(lines) + render_template("body.js", {}) + render_template(name, {})


def client_variable(settings: Gateway) -> str:
    return "$spark_client" if settings.replicas else "$binary_remote_addr"


def _render_limits(settings: Gateway) -> str:
    """Return limits per client address, counted separately for requests without a valid key.

    Otherwise, clients without a key could use up the limit of other clients at the same address.
    """
    client = client_variable(settings)
    keyed, keyless = "$spark_keyed_client", "$spark_keyless_client"
    lines = [
        f'map $spark_key {keyed} {{ 1 {client}; default ""; }}',
        f'map $spark_key {keyless} {{ 1 ""; default {client}; }}',
    ]
    for zone, key in (("keyed", keyed), ("keyless", keyless)):
        if rate := settings.max_requests_per_s:
            lines += [f"limit_req_zone {key} zone={zone}_requests:1m rate={rate}r/s;"]
            lines += [f"limit_req zone={zone}_requests burst={rate * 2} nodelay;"]
        if limit := settings.max_connections:
            lines += [f"limit_conn_zone {key} zone={zone}_connections:1m;"]
            lines += [f"limit_conn {zone}_connections {limit};"]
    return "\n    ".join(lines)


def _render_listen(listener: Listener) -> str:
    # Without `reuseport`, a reload that replaces all addresses with a single address fails.
    directive = ["listen", str(listener), "reuseport"]
    directive += ["ipv6only=on"] if ":" in listener.address else []
    return " ".join(directive + (["ssl"] if listener.tls else [])) + ";"


def _render_tls(settings: Gateway, paths: Paths) -> str:
    if settings.tls is None:
        return ""
    certificate, key = paths.below(settings.tls.certificate), paths.below(settings.tls.key)
    try:
        # With the digest, a renewed certificate changes the configuration and causes a reload.
        digest = hashlib.sha256(certificate.read_bytes()).hexdigest()
    except FileNotFoundError as error:
        raise HostToolError(str(certificate), "is missing", "run the deploy again") from error
    return (
        f"# sha256 {digest}\n        ssl_certificate {certificate};\n"
        f"        ssl_certificate_key {key};\n        ssl_protocols TLSv1.2 TLSv1.3;\n"
        # Only authenticated ciphers with forward secrecy.
        "        ssl_ciphers ECDHE+AESGCM:ECDHE+CHACHA20;\n"
        "        ssl_session_cache shared:tls:1m;\n        ssl_session_tickets off;"
    )


def _render_replicas(
    settings: Gateway, listening: tuple[Listener, ...], paths: Paths
) -> tuple[str, list[str]]:
    """Return the balancer's configuration, and directives for this host's gateway.

    Replicas with an unknown address are left out. Health checks are not needed, because a host
    without a proven engine returns 503, and nginx then tries the next host.
    """
    if settings.replicas is None:
        return "", []
    local_socket = f"unix:{paths.gateway_run(settings.service)}/replicas.sock"
    others = listeners.replica_addresses(settings, paths).values()
    servers = [local_socket, *others]
    # Requests from a balancer are not limited, because the balancer has already counted them.
    balancers = ("unix:", *(address.rpartition(":")[0].strip("[]") for address in others))
    port = settings.replicas.port
    balancer_listeners = [Listener(item.address, port, item.tls) for item in listening]
    values = {
        "NEAR": " ".join(f'"{address}" "";' for address in balancers),
        "SERVERS": "\n    ".join(
            f"server {server} max_fails=1 fail_timeout=2s;" for server in servers
        ),
        "LISTEN": "\n    ".join(f"listen {listener} reuseport;" for listener in balancer_listeners),
        "TRIES": str(len(servers)),
        "BODY_LIMIT": "".join(_reject_large_bodies(settings)),
    }
    text = render_template("replicas.conf", values)
    return "\n\n" + text.rstrip(), [f"listen {local_socket};"]


def share(paths: Paths) -> NoReturn:
    """Replace this process with nginx, which serves checkpoint files to clients with the key."""
    settings = files.load(Share, paths.below(SHARE_SETTINGS), "no files are shared")
    try:
        folder = Path(os.environ["RUNTIME_DIRECTORY"])
        key = (Path(os.environ["CREDENTIALS_DIRECTORY"]) / "key").read_text().strip()
    except (KeyError, FileNotFoundError) as error:
        message = f"the environment of the systemd unit is missing ({error})"
        fix = "run `systemctl start spark-share@trees` instead"
        raise HostToolError("share", message, fix) from error
    config = folder / "nginx.conf"
    files.write_text(folder / "keys.conf", render_key_maps(key), 0o600)
    files.write_text(config, render_share(settings, folder, paths), 0o600)
    program = find_program(paths)
    os.execv(program, [program, "-p", str(folder), "-c", str(config), "-e", "stderr"])


def render_share(settings: Share, folder: Path, paths: Paths) -> str:
    address = f"[{settings.address}]" if ":" in settings.address else settings.address
    values = {
        "RUN": str(folder),
        "LISTEN": f"{address}:{settings.port}",
        "TREES": "\n        ".join(_render_share_locations(tree, paths) for tree in settings.trees),
    }
    return render_template("share.conf", values)


def _render_share_locations(tree: SharedTree, paths: Paths) -> str:
    out = paths.below(tree.dir)
    folders = [out, partial_tree(out)] if tree.unfinished else [out]
    progress = paths.below(job_dir(tree.job)) / "progress"
    candidates = " ".join(quote_path(folder, "/$1") for folder in folders)
    # Links are allowed only in the path of the models folder.
    from_models = '"from=' + quote_path(out.parent).removeprefix('"')
    return (
        f"location ~ ^/{tree.digest}/files/(.+)$ "
        f"{{ disable_symlinks on {from_models}; try_files {candidates} =404; }}\n"
        f"        location = /{tree.digest}/progress {{ try_files {quote_path(progress)} =404; }}"
    )
