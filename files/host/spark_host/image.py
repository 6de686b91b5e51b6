"""``spark-host image``: pulls an image, from other hosts if possible, then runs a command.

A local nginx serves shared blobs to docker, so that the image keeps the registry's digest. Only
docker's API reports the bytes of each layer.
"""

import base64
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode

from spark_contract import fetching, files
from spark_contract.builder_api import BUILDER, LAYERS
from spark_contract.job import Progress
from spark_contract.paths import Paths
from spark_contract.tool import LAYERS_OPTION, HostToolError

from spark_host.gateway import nginx
from spark_host.system import docker
from spark_host.system.programs import log

_START_TIMEOUT_S = 10.0  # of the local registry
_EXISTS, _UNPACKING, _DOWNLOADED = "Already exists", "Extracting", "Download complete"
# A layer with such a status no longer needs the registry.
_LOCAL = frozenset({"Verifying Checksum", _DOWNLOADED, _UNPACKING, "Pull complete", _EXISTS})
_UNPACK_LIMIT_S = 3600.0  # docker reports no progress meanwhile
_REPORT_INTERVAL_S = 2.0
_POLL_INTERVAL_S = 0.2
_LINE_BYTES = 1 << 20  # docker's lines have about 200 bytes
_MESSAGE_LENGTH = 300
_RUN_AGAIN = "see `journalctl -u docker`, then deploy again; docker keeps complete layers"


def main(args: list[str], paths: Paths) -> int:
    layers_plan = None
    if args[:1] == [LAYERS_OPTION] and len(args) > 1:
        layers_plan, args = args[1], args[2:]
    if not args or args[0].startswith("-"):
        usage = f"image [{LAYERS_OPTION} LAYERS.json] REFERENCE [COMMAND...]"
        raise HostToolError("image", f"invalid arguments {args}", f"run `spark-host {usage}`", 2)
    reference, *command = args
    try:
        if layers_plan is not None and docker.inspect_image(reference) is None:
            _pull_from_peers(Path(layers_plan), paths)
    except (HostToolError, OSError) as error:
        print(f"image: cannot be pulled from other hosts: {error}", file=sys.stderr, flush=True)
    if docker.inspect_image(reference) is None:
        pull(reference)
    if not command:
        return 0
    log(Progress("build", None, None, None, None).line())
    os.execvp(command[0], command)


def _pull_from_peers(plan_file: Path, paths: Paths) -> None:
    plan = files.load(fetching.LayersPlan, plan_file, "no such download plan")
    blobs, manifests = Path(plan.out), plan_file.parent / "manifests"
    fetch_argv = [sys.executable, "-m", BUILDER, LAYERS, str(plan_file), str(manifests)]
    if subprocess.run(fetch_argv, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise HostToolError(plan.reference, "cannot download the layers", "see the log lines above")
    reference = fetching.parse_reference(plan.reference)
    with _local_registry(blobs, manifests, paths) as address:
        local_reference = f"{address}/{reference.name}@{reference.version}"
        pull(local_reference)
    # Docker already has the layers, so this only adds the original name.
    pull(plan.reference)
    docker.client("image", "rm", local_reference)
    if not plan.keep:
        shutil.rmtree(blobs)


@contextmanager
def _local_registry(blobs: Path, manifests: Path, paths: Paths) -> Iterator[str]:
    with TemporaryDirectory(prefix="spark-image-") as run, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        locations = map(_manifest_location, sorted(manifests.glob("sha256:*")))
        values = {
            "RUN": run,
            "PORT": str(port),
            "TREE": nginx.quote_path(blobs),
            "MANIFESTS": "\n        ".join(locations),
        }
        config = Path(run) / "nginx.conf"
        files.write_text(config, nginx.render_template("image.conf", values), 0o600)
        argv = [nginx.find_program(paths), "-p", run, "-c", str(config), "-e", "stderr"]
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as server:
            try:
                _wait_for_port(port, server)
                yield f"127.0.0.1:{port}"
            finally:
                server.terminate()


def _wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    message = "does not accept connections on the loopback address"
    raise HostToolError("nginx", message, "see the log lines above")


def _manifest_location(path: Path) -> str:
    manifest = json.loads(path.read_text())
    declared, is_index = manifest.get("mediaType"), "manifests" in manifest
    # The first two types are for indexes, the rest for single images.
    allowed = fetching.MANIFEST_TYPES[:2] if is_index else fetching.MANIFEST_TYPES[2:]
    kind = declared if declared in allowed else allowed[0]
    return (
        f"location ~ /manifests/{path.name}$ {{ root {nginx.quote_path(path.parent)}; "
        f"default_type {kind}; try_files /{path.name} =404; "
        f"add_header Docker-Content-Digest {path.name}; }}"
    )


class PullProgress:
    """Follows the events of a pull; only a new layer status or enough bytes count as progress.

    Containerd repeats events, and a registry may send one byte per minute.
    """

    def __init__(self, now: float, stall_s: float):
        self._lock = threading.Lock()
        self._stall_s = stall_s
        self._status: dict[str, str] = {}
        self._seen: set[tuple[str, str]] = set()
        # Bytes per layer.
        self._downloaded: dict[str, int] = {}
        self._unpacked: dict[str, int] = {}
        self._totals: dict[str, int] = {}
        self._progress_at, self._progress_bytes = now, 0
        self._phase, self._phase_at = "pull", now

    def add_event(self, event: dict[str, Any], now: float) -> None:
        """Record an event; a new status or enough bytes count as progress."""
        layer, status = str(event.get("id")), str(event.get("status"))
        with self._lock:
            if "progressDetail" in event:
                self._status[layer] = status
                self._count_bytes(layer, status, event["progressDetail"])
            # "Retrying in 5 seconds" and "Retrying in 4 seconds" are the same status.
            layer_status = (layer, re.sub(r"\d+", "#", status))
            bytes_now = sum(self._downloaded.values()) + sum(self._unpacked.values())
            min_bytes = 1.0
            if self._is_downloading():
                min_bytes = fetching.PULL_MIN_BYTES_PER_S * self._stall_s
            if layer_status not in self._seen or bytes_now - self._progress_bytes >= min_bytes:
                self._progress_at, self._progress_bytes = now, bytes_now
            self._seen.add(layer_status)

    def _count_bytes(self, layer: str, status: str, value: object) -> None:
        detail = value if isinstance(value, dict) else {}
        current, total = detail.get("current"), detail.get("total")
        if isinstance(total, int) and total > 0:
            self._totals[layer] = total
        bytes_by_layer = self._unpacked if status == _UNPACKING else self._downloaded
        if status == _DOWNLOADED:
            current = self._totals.get(layer)
        # If there are `units`, `current` is a time. A retry restarts at 0, so keep the maximum.
        if isinstance(current, int) and not detail.get("units"):
            bytes_by_layer[layer] = max(current, bytes_by_layer.get(layer, 0))

    def _is_downloading(self) -> bool:
        return not self._status or not _LOCAL.issuperset(self._status.values())

    def stall_message(self, now: float) -> str | None:
        """Return a message if the pull has stalled, or None."""
        with self._lock:
            idle_s = now - self._progress_at
            if not self._is_downloading():
                if idle_s <= max(_UNPACK_LIMIT_S, self._stall_s):
                    return None
                minutes = f"{_UNPACK_LIMIT_S / 60:.0f} minutes"
                return f"docker has downloaded all layers, but has made no progress for {minutes}"
            if idle_s <= self._stall_s:
                return None
            statuses = sorted(self._status.items())
            waiting = [layer for layer, status in statuses if status not in _LOCAL]
            data = f"data for layer {waiting[0]}" if waiting else "data"
            size = f"{sum(self._downloaded.values()) / 1e6:,.1f} MB"
            return f"the pull stalled after {size}: docker received no {data} in {idle_s:.0f} s"

    def progress(self, now: float) -> Progress:
        with self._lock:
            downloading = self._is_downloading()
            phase = "pull" if downloading else "unpack"
            bytes_by_layer = self._downloaded if downloading else self._unpacked
            if phase != self._phase:
                self._phase, self._phase_at = phase, now
            new_layers = [layer for layer, status in self._status.items() if status != _EXISTS]
            has_totals = new_layers and all(layer in self._totals for layer in new_layers)
            total = sum(self._totals[layer] for layer in new_layers) if has_totals else None
            done_bytes = sum(bytes_by_layer.values())
            rate = round(done_bytes / max(now - self._phase_at, 1.0)) if downloading else None
            eta_s = round((total - done_bytes) / rate) if total and rate else None
            return Progress(phase, done_bytes if bytes_by_layer else None, total, rate, eta_s)


def pull(reference: str, *, stall_s: float = fetching.PULL_STALL_S) -> None:
    """Pull an image by name and digest; raise HostToolError if the pull fails or stalls."""
    tracker, stalls = PullProgress(time.monotonic(), stall_s), list[HostToolError]()
    try:
        with _watched_connection(reference, tracker, stalls) as connection:
            for event in _pull_events(connection, reference):
                _raise_docker_error(reference, event)
                tracker.add_event(event, time.monotonic())
    except (OSError, HTTPException) as error:
        if not stalls:
            reason = getattr(error, "strerror", None) or "the connection was closed"
            message = f"docker is not running, or aborted the pull ({reason.lower()})"
            fix = f"run `systemctl status docker`; {_RUN_AGAIN}"
            raise HostToolError(reference, message, fix) from error
    if stalls:
        raise stalls[0]
    if docker.inspect_image(reference) is None:
        message = "docker reported success, but the image is missing"
        raise HostToolError(reference, message, _RUN_AGAIN)


@contextmanager
def _watched_connection(
    reference: str, tracker: PullProgress, stalls: list[HostToolError]
) -> Iterator[HTTPConnection]:
    """Connect to docker; a thread reports progress and closes the connection after a stall."""
    connection, ended = docker.connection(docker.RETRY_TIMEOUT_S), threading.Event()
    connection.connect()
    connection.sock.settimeout(None)  # the thread enforces the limit

    def watch() -> None:
        reported_at = 0.0
        while not ended.wait(_POLL_INTERVAL_S):
            now = time.monotonic()
            if now - reported_at >= _REPORT_INTERVAL_S:
                log(tracker.progress(now).line())
                reported_at = now
            if message := tracker.stall_message(now):
                fix = f"check the registry and the network connection to it; {_RUN_AGAIN}"
                stalls.append(HostToolError(reference, message, fix))
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield connection
    finally:  # closing the connection makes docker cancel the pull
        ended.set()
        thread.join()
        connection.close()


def _pull_events(connection: HTTPConnection, reference: str) -> Iterator[dict[str, Any]]:
    """Request a pull from docker and yield the events."""
    name, _, digest = reference.partition("@")
    folder, slash, image_and_tag = name.rpartition("/")
    image, _, tag = image_and_tag.partition(":")
    query = {"fromImage": f"{folder}{slash}{image}", "tag": digest or tag or "latest"}
    auth = registry_auth(reference)
    headers = {"X-Registry-Auth": auth} if auth else {}
    connection.request("POST", f"/images/create?{urlencode(query)}", headers=headers)
    with connection.getresponse() as response:
        rest = b""
        while chunk := response.read1(1 << 16):  # readline() would hide a lost connection
            *lines, rest = (rest[:_LINE_BYTES] + chunk).split(b"\n")
            yield from filter(None, map(_parse_event, lines))
        yield from filter(None, [_parse_event(rest)])
        if response.status != 200:
            message = f"docker responds with status {response.status}"
            raise HostToolError(reference, message, _RUN_AGAIN)


def _parse_event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _raise_docker_error(reference: str, event: dict[str, Any]) -> None:
    """Raise the error that docker reports, even in a response with status 200."""
    detail = event.get("errorDetail")
    reason = detail.get("message") if isinstance(detail, dict) else None
    reason = reason or event.get("error")
    if not reason and "status" not in event:
        reason = event.get("message")
    if reason:
        start = str(reason)[: 4 * _MESSAGE_LENGTH]
        printable = "".join(letter if letter.isprintable() else " " for letter in start)
        message = f"docker cannot pull the image: {' '.join(printable.split())[:_MESSAGE_LENGTH]}"
        fix = "check the registry's address, the login and the network; see `journalctl -u docker`"
        raise HostToolError(reference, message, fix)


def registry_auth(reference: str) -> str | None:
    """Return the ``X-Registry-Auth`` header from the login of root's docker client, if any.

    The login never appears in arguments, logs or errors.
    """
    host = fetching.parse_reference(reference).host
    environment = docker.client_environment()
    try:
        config = json.loads(Path(environment["HOME"], ".docker/config.json").read_text())
        key = "https://index.docker.io/v1/" if host == fetching.DOCKER_HUB else host
        login = _helper_login(config, key, environment) or _file_login(config, key)
    except (OSError, ValueError, AttributeError, TypeError, subprocess.SubprocessError):
        return None
    if not login:
        return None
    return base64.urlsafe_b64encode(json.dumps({**login, "serveraddress": key}).encode()).decode()


def _helper_login(
    config: Mapping[str, Any], key: str, environment: Mapping[str, str]
) -> dict[str, str] | None:
    name = (config.get("credHelpers") or {}).get(key) or config.get("credsStore")
    if not name or not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        return None
    with suppress(OSError):
        result = subprocess.run(
            [f"docker-credential-{name}", "get"], input=key, capture_output=True, text=True,
            env=environment, timeout=30, check=False,
        )  # fmt: skip
        answer = json.loads(result.stdout) if result.returncode == 0 else {}
        user, secret = answer.get("Username"), answer.get("Secret")
        if user and secret:
            if user == "<token>":
                return {"identitytoken": str(secret)}
            return {"username": user, "password": secret}
    return None


def _file_login(config: Mapping[str, Any], key: str) -> dict[str, str] | None:
    logins = config.get("auths") or {}
    matching = (logins[name] for name in logins if _registry_host(name) == key)
    login = logins.get(key) or next(matching, None)
    if not login:
        return None
    if login.get("identitytoken"):
        return {"identitytoken": login["identitytoken"]}
    user, _, password = base64.b64decode(login.get("auth") or "").decode().partition(":")
    return {"username": user, "password": password.rstrip("\0")} if user else None


def _registry_host(key: str) -> str:
    return key.partition("://")[2].partition("/")[0] if "://" in key else key.partition("/")[0]
