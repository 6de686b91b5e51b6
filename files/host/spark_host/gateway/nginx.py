"""The configuration of a gateway's nginx, made from the service's settings."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import socket
import subprocess
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.gateway import Gateway
from spark_contract.paths import Paths

from spark_host.gateway import api_key, listeners, routes
from spark_host.gateway.listeners import Listener

# nginx chooses. It knows nothing of proofs, and need not: each host's own gateway is open only
# while what stands behind it is proven, and says 503 otherwise, before any engine has the
# request. So it is asked of the next host, and that one is left alone for a moment.


# What has just refused is asked again after so long.
_REST = "max_fails=1 fail_timeout=2s"


@dataclass(frozen=True, slots=True)
class Together:
    """What stands in the configuration for the replicas; nothing where there are none."""

    http: str = ""  # beside the servers
    client: str = "$binary_remote_addr"  # whom limits count
    listen: str = ""  # where the gateway of this host is asked by the balancer of this host
    listeners: tuple[Listener, ...] = ()  # of the balancer


def together(settings: Gateway, listeners: tuple[Listener, ...], paths: Paths) -> Together:
    """Return the balancer of a gateway; replicas whose names nobody knows are left out for now."""
    if settings.replicas is None:
        return Together()
    own = f"unix:{paths.gateway_run(settings.service)}/replicas.sock"
    others = [found for one in settings.replicas.others if (found := _resolved(one))]
    servers = [own, *(f"{address}:{port}" for address, port in others)]
    # Each client was counted where it came in, at the balancer.
    near = ("unix:", *(address.strip("[]") for address, _ in others))
    port = settings.replicas.port
    heard = tuple(replace(one, port=port) for one in listeners)
    values = {
        "NEAR": " ".join(f'"{one}" "";' for one in near),
        "SERVERS": "\n    ".join(f"server {one} {_REST};" for one in servers),
        "LISTEN": "\n    ".join(f"listen {one} reuseport;" for one in heard),
        "TRIES": str(len(servers)),
    }
    template = resources.files("spark_host.gateway").joinpath("templates/replicas.conf").read_text()
    text = re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], template)
    return Together("\n\n" + text.rstrip(), "$spark_client", f"listen {own};", heard)


def _resolved(place: str) -> tuple[str, str] | None:
    host, _, port = place.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    family, *_, address = found[0]
    shown = f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])
    return shown, port


# nginx reads no bodies, so a script of nginx's own JavaScript does; it says what it reads and
# why.


SCRIPT = "names.js"
# Where the packages of the distributions and of nginx.org put it.
_MODULE = "usr/lib/nginx/modules/ngx_http_js_module.so"


def module(settings: Gateway, paths: Paths) -> str:
    """Return what has nginx load its JavaScript; nothing for a host with one service.

    Raises:
        HostToolError: It is not installed.
    """
    if not settings.names:
        return ""
    place = paths.root / _MODULE
    if not place.is_file():
        fix = "run the deploy again, or apt-get install libnginx-mod-http-js"
        raise HostToolError("nginx's JavaScript", f"{place} is not there", fix)
    return f"load_module {place};"


def imported(settings: Gateway, paths: Paths) -> str:
    """Return what has nginx read the script, which must lie beside its configuration."""
    if not settings.names:
        return ""
    return f"js_import names from {paths.gateway_run(settings.service) / SCRIPT};"


def script_text(settings: Gateway, paths: Paths) -> str:
    """Return the script with this host's services; that of the gateway itself is the first."""
    named = settings.names or {}
    first = {settings.service: named[settings.service]}
    services = [
        {"service": one, "traffic": str(paths.traffic(one)), "names": list(names)}
        for one, names in (first | named).items()
    ]
    script = resources.files("spark_host.gateway").joinpath(f"templates/{SCRIPT}").read_text()
    known = (("SERVICES", services), ("ROUTES", settings.routes))
    return "".join(f"const {name} = {json.dumps(value)};\n" for name, value in known) + script


# What stands between quotes in a configuration and means itself.
_PLAIN = re.compile(r"/[A-Za-z0-9._/ +@,:=-]*\Z")
LARGE_BODIES = 32
"""Bodies too large for memory that are on disk at once, from all clients together."""


def program(paths: Paths) -> str:
    """Return the path of nginx below the host's root.

    Raises:
        HostToolError: It is not installed.
    """
    for name in ("usr/sbin/nginx", "usr/local/sbin/nginx", "usr/bin/nginx"):
        if os.access(paths.root / name, os.X_OK):
            return str(paths.root / name)
    raise HostToolError("nginx", "not installed", "run the deploy again")


def render(settings: Gateway, paths: Paths) -> Path:
    """Write keys.conf and a tested nginx.conf below /run; return their directory.

    Raises:
        HostToolError: nginx refuses the configuration; the one before stays.
    """
    directory = paths.gateway_run(settings.service)
    folder = paths.gateway_bodies(settings.service)
    for place in (directory, folder.parent, folder):
        place.mkdir(parents=True, exist_ok=True)
        # Workers must pass through to their temporary directories, nobody may list or read.
        os.chmod(place, 0o711)
    # A deploy and the watch may want it at once, and both write beside the one that is used.
    alone = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(alone, fcntl.LOCK_EX)
        _write(directory, settings, paths)
    finally:
        os.close(alone)
    return directory


def _write(directory: Path, settings: Gateway, paths: Paths) -> None:
    for path, text in _beside(settings, paths).items():
        files.write_text(path, text, 0o600)
    new = directory / "nginx.conf.new"
    files.write_text(new, config_text(settings, paths), 0o600)
    tested = subprocess.run(
        [program(paths), "-t", "-q", "-p", str(directory), "-c", str(new), "-e", "stderr"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if tested.returncode != 0:
        said = (tested.stderr.strip().splitlines() or ["it says nothing"])[0]
        raise HostToolError(
            f"gateway of {settings.service}", f"nginx refuses it: {said}", "run the deploy again"
        )
    os.replace(new, directory / "nginx.conf")


def is_current(settings: Gateway, paths: Paths) -> bool:
    """Return whether what is rendered follows from the settings, key and addresses of now."""
    directory = paths.gateway_run(settings.service)
    wanted = _beside(settings, paths) | {directory / "nginx.conf": config_text(settings, paths)}
    return all(path.is_file() and path.read_text() == text for path, text in wanted.items())


def _beside(settings: Gateway, paths: Paths) -> dict[Path, str]:
    """Return what the configuration includes."""
    directory = paths.gateway_run(settings.service)
    found = {directory / "keys.conf": keys_text(api_key.read(settings, paths))}
    if settings.names:
        found[directory / SCRIPT] = script_text(settings, paths)
    return found


def quoted(path: Path, more: str = "") -> str:
    """Return a path as a configuration holds it, with what nginx shall put behind it.

    Raises:
        HostToolError: nginx would read something else.
    """
    if not _PLAIN.match(str(path)):
        raise HostToolError("share", f"cannot lend {path}", "choose a plainer path for it")
    return f'"{path}{more}"'


def bodies(settings: Gateway, paths: Paths) -> Path:
    """Return where the bodies lie that do not fit into memory."""
    return paths.gateway_bodies(settings.service) / "body"


def keys_text(key: str) -> str:
    """Return nginx maps that set ``$spark_key`` to 1 for the right key.

    Regular expressions, because nginx compares plain map strings without regard to case.
    """
    escaped = re.sub(r"([.+/=~-])", r"\\\1", key)
    return (
        f'map $http_x_api_key $spark_header_key {{ default 0; "~^{escaped}$" 1; }}\n'
        "map $http_authorization $spark_key "
        f'{{ default $spark_header_key; "~^[Bb]earer +{escaped}$" 1; }}\n'
    )


def config_text(settings: Gateway, paths: Paths) -> str:
    """Return the nginx configuration of a service's gateway."""
    own = _target(settings.service, settings, paths)
    named = settings.names or {}
    listening = listeners.wanted(settings).listeners
    shared = together(settings, listening, paths)
    routed = {path: _target(to, settings, paths) for path, to in settings.routes.items()}
    values = {
        "USER": settings.user,
        "GROUP": "nogroup" if settings.user == "nobody" else settings.user,
        "RUN": str(paths.gateway_run(settings.service)),
        "BODIES": str(bodies(settings, paths)),
        "LARGE_BODIES": str(LARGE_BODIES),
        "MAX_BODY_BYTES": str(settings.max_body_bytes),
        "UPSTREAMS": "\n    ".join(
            _upstream(one, settings, paths)
            for one in dict.fromkeys((settings.service, *settings.routes.values(), *named))
        ),
        "JOURNAL": str(paths.below("/run/systemd/journal/dev-log")),
        "LISTEN": "\n        ".join(
            [*map(_listen, listening), *([shared.listen] if shared.listen else [])]
        ),
        "TLS": _tls(settings, paths),
        "OPEN_ONLY": own.when_open,
        "MODULE": module(settings, paths),
        "BY_NAME": imported(settings, paths),
        "WAYS": routes.locations(
            lambda path: routed.get(path, own),
            {one: _target(one, settings, paths) for one in named},
        ),
        "LIMITS": _limits(settings, shared.client),
        "REPLICAS": shared.http,
    }
    template = resources.files("spark_host.gateway").joinpath("templates/gateway.conf").read_text()
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], template)


def _target(service: str, settings: Gateway, paths: Paths) -> routes.Target:
    """Return the engine of a service; each service opens and closes its own traffic."""
    name = "engine" if service == settings.service else f"engine-{service}"
    closed = f"if (!-f {paths.traffic(service)}) {{ rewrite ^ /refused/closed last; }}"
    return routes.Target(name, closed)


def _upstream(service: str, settings: Gateway, paths: Paths) -> str:
    return (
        f"upstream {_target(service, settings, paths).upstream} {{\n"
        f"        server unix:{paths.engine_socket(service)} max_fails=0;\n"
        "        keepalive 16;\n"
        "    }"
    )


def _limits(settings: Gateway, client: str) -> str:
    """Return the limits of one client address."""
    lines = []
    if rate := settings.max_requests_per_s:
        lines += [f"limit_req_zone {client} zone=clients:1m rate={rate}r/s;"]
        lines += [f"limit_req zone=clients burst={rate * 2} nodelay;"]
    if most := settings.max_connections:
        lines += [f"limit_conn_zone {client} zone=connections:1m;"]
        lines += [f"limit_conn connections {most};"]
    return "\n    ".join(lines)


def _listen(one: listeners.Listener) -> str:
    # With `reuseport` each address is a socket of its own: a reload that goes from every address
    # to one of them would fail without it, because the old socket is still open then.
    words = ["listen", str(one), "reuseport"]
    words += ["ipv6only=on"] if ":" in one.address else []
    return " ".join(words + (["ssl"] if one.tls else [])) + ";"


def _tls(settings: Gateway, paths: Paths) -> str:
    if settings.tls is None:
        return ""
    certificate = paths.below(settings.tls.certificate)
    key = paths.below(settings.tls.key)
    try:
        # The hash makes a renewed certificate a changed configuration.
        digest = hashlib.sha256(certificate.read_bytes()).hexdigest()
    except FileNotFoundError as error:
        raise HostToolError(str(certificate), "no certificate", "run the deploy again") from error
    return (
        f"# sha256 {digest}\n        ssl_certificate {certificate};\n"
        f"        ssl_certificate_key {key};\n        ssl_protocols TLSv1.2 TLSv1.3;\n"
        # What is encrypted is authenticated with it, and a key that leaks opens no old records.
        "        ssl_ciphers ECDHE+AESGCM:ECDHE+CHACHA20;\n"
        "        ssl_session_cache shared:tls:1m;\n        ssl_session_tickets off;"
    )
