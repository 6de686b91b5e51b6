"""The gateway of a service: an nginx of its own with a key and a list of allowed paths."""

from __future__ import annotations

import os
import pwd
import re
import secrets
import signal
import socket
import time
from importlib import resources
from pathlib import Path

from spark_serve import boot, files, systemd
from spark_serve.errors import HostToolError
from spark_serve.paths import Paths
from spark_serve.release import Release, load_if_present, names, service_of, socket_path

_KEY = re.compile(r"^[A-Za-z0-9._~+/=-]{16,512}$")


def run(service: str, paths: Paths) -> int:
    """Render the configuration of a service and become its nginx."""
    release = _configuring_release(service, paths)
    directory = render(release, paths)
    config = str(directory / "nginx.conf")
    nginx = _nginx()
    os.execv(nginx, [nginx, "-p", str(directory), "-c", config, "-e", "stderr"])


def reload(service: str, paths: Paths, release: Release | None = None) -> int:
    """Render again and let nginx take it over; answers under way are finished first.

    Args:
        service: The service whose gateway changes.
        paths: Where the records are.
        release: Take the settings of this one; else of the release in use.
    """
    render(release or _configuring_release(service, paths), paths)
    pid_file = paths.gateway_run(service) / "nginx.pid"
    try:
        os.kill(int(pid_file.read_text()), signal.SIGHUP)
    except (FileNotFoundError, ValueError, ProcessLookupError) as error:
        raise HostToolError(
            f"gateway of {service}", "does not run", f"systemctl start spark-gateway@{service}"
        ) from error
    return 0


def bring_up(release: Release, paths: Paths) -> None:
    """Have the gateway run with this release's settings."""
    unit = release.gateway_unit
    make_key(release, paths)
    # The good record is not written yet on a first deploy; the hint says whom to follow.
    files.write_text(paths.service_run(release.service) / "gateway-of", release.name + "\n")
    if not systemd.is_active(unit) or not boots(release.service, paths):
        systemd.systemctl("reset-failed", unit)
        said = systemd.systemctl("enable", "--now", unit)
        if said.returncode != 0:
            raise HostToolError(unit, said.stderr.strip(), f"journalctl -u {unit}")
        return
    current = paths.gateway_run(release.service) / "nginx.conf"
    keys = current.with_name("keys.conf")
    wanted = {current: config_text(release, paths), keys: keys_text(read_key(release, paths))}
    if any(not path.is_file() or path.read_text() != text for path, text in wanted.items()):
        reload(release.service, paths, release)


def boots(service: str, paths: Paths) -> bool:
    """Return whether the gateway starts with the host."""
    return (paths.units / f"multi-user.target.wants/spark-gateway@{service}.service").is_symlink()


def render(release: Release, paths: Paths) -> Path:
    """Write nginx.conf and keys.conf below /run; return their directory."""
    directory = paths.gateway_run(release.service)
    directory.mkdir(parents=True, exist_ok=True)
    # Workers must pass through to their temporary directories, nobody may list or read.
    os.chmod(directory, 0o711)
    key = read_key(release, paths)
    files.write_text(directory / "keys.conf", keys_text(key), 0o600)
    files.write_text(directory / "nginx.conf", config_text(release, paths), 0o600)
    return directory


def make_key(release: Release, paths: Paths) -> None:
    """Have an API key on this host; one that is there is kept."""
    path = _key_path(release, paths)
    if path.exists():
        os.chmod(path, 0o600)
    else:
        files.write_text(path, secrets.token_urlsafe(32) + "\n", 0o600)


def read_key(release: Release, paths: Paths) -> str:
    """Return the API key.

    Raises:
        HostToolError: It is missing, readable by others, or not usable in a header.
    """
    path = _key_path(release, paths)
    try:
        mode, key = path.stat().st_mode, path.read_text().strip()
    except FileNotFoundError as error:
        raise HostToolError(str(path), "no API key", "run the deploy again") from error
    if mode & 0o077:
        raise HostToolError(str(path), "is readable by others", f"chmod 600 {path}")
    if not _KEY.match(key):
        raise HostToolError(
            str(path),
            "not a usable key (16 to 512 letters, digits or . _ ~ + / = -)",
            f"remove {path} and run the deploy: it makes a new one",
        )
    return key


def _key_path(release: Release, paths: Paths) -> Path:
    return paths.root / release.gateway.key_path.lstrip("/")


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


def config_text(release: Release, paths: Paths) -> str:
    """Return the nginx configuration of a release's service."""
    path = socket_path(release, paths)
    upstream = f"unix:{path}" if path else f"127.0.0.1:{release.engine.option('--port')}"
    rate = release.gateway.rate_per_s
    values = {
        "USER": release.gateway.user,
        "GROUP": "nogroup" if release.gateway.user == "nobody" else release.gateway.user,
        "RUN": str(paths.gateway_run(release.service)),
        "MAX_BODY_BYTES": str(release.gateway.max_body_bytes),
        "UPSTREAM": upstream,
        "LISTEN": "\n        ".join(_listen(a, p) for a, p in release.gateway.listen),
        "OPEN_ONLY": f"if (!-f {paths.door(release.service)}) {{ return 503; }}",
        "LIMIT_ZONE": ""
        if rate is None
        else f"limit_req_zone $server_name zone=all:64k rate={rate}r/s; limit_req_status 429;",
        "LIMIT": "" if rate is None else f"limit_req zone=all burst={rate * 2} nodelay;",
    }
    template = resources.files("spark_serve").joinpath("gateway.conf").read_text()
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], template)


def _listen(address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"listen {host}:{port};"


def _configuring_release(service: str, paths: Paths) -> Release:
    """Return the release whose gateway settings hold: running, else hinted, else good, else any."""
    hint = paths.service_run(service) / "gateway-of"
    hinted = hint.read_text().strip() if hint.is_file() else None
    mine = [name for name in names(paths) if service_of(name) == service]
    for name in (hinted, boot.good(service, paths)["release"], *reversed(mine)):
        release = load_if_present(name, paths) if name else None
        if release is not None:
            return release
    raise HostToolError(
        f"gateway of {service}", "no release of this service", "run the deploy for this host"
    )


def _nginx() -> str:
    for path in ("/usr/sbin/nginx", "/usr/local/sbin/nginx", "/usr/bin/nginx"):
        if os.access(path, os.X_OK):
            return path
    raise HostToolError("nginx", "not installed", "run the deploy again")


def problem(release: Release) -> HostToolError | None:
    """Return why this release's gateway could not run here; ``None`` when it could."""
    try:
        _nginx()
        pwd.getpwnam(release.gateway.user)
    except KeyError:
        return HostToolError(
            f"account {release.gateway.user}",
            "does not exist on this host",
            "systemd-sysusers /etc/sysusers.d/spark.conf, or run the deploy again",
        )
    except HostToolError as error:
        return error
    return None


def wait_until_listening(release: Release, paths: Paths, wait_s: float = 10) -> None:
    """Return once the gateway accepts connections on its first address."""
    address, port = release.gateway.listen[0]
    deadline = time.monotonic() + wait_s
    while True:
        try:
            socket.create_connection((address, port), 1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise HostToolError(
                    release.gateway_unit,
                    f"does not accept connections on {address}:{port}: {error}",
                    f"journalctl -u {release.gateway_unit}",
                ) from error
        time.sleep(0.1)
