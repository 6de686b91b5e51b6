"""Pulls an image through docker's API, with progress in bytes and a stall timeout.

The API reports the bytes of each layer; the docker client shows them only on a terminal.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from spark_contract.errors import HostToolError
from spark_contract.fetching import (
    DOCKER_HUB,
    PULL_LEAST_BYTES_PER_S,
    PULL_STALL_S,
    parse_reference,
)
from spark_contract.job import Progress

from spark_host.system import docker
from spark_host.system.programs import log

_EXISTS, _UNPACKING, _DOWNLOADED = "Already exists", "Extracting", "Download complete"
# Layers with these statuses no longer need the registry.
_LOCAL = frozenset({"Verifying Checksum", _DOWNLOADED, _UNPACKING, "Pull complete", _EXISTS})
_UNPACK_LIMIT_S = 3600.0  # docker can be silent while it unpacks gigabytes
_REPORT_S = 2.0
_POLL_S = 0.2
_LINE_BYTES = 1 << 20  # docker's lines have about 200 bytes
_MESSAGE_LENGTH = 300
_RUN_AGAIN = "`journalctl -u docker`; then run again: whole layers stay"


class Layers:
    """The progress of each layer, shared by the reading and the watching thread.

    Only a new status of a layer or enough bytes count as progress: containerd's store repeats
    itself ten times a second, and a registry may send a byte a minute.
    """

    def __init__(self, now: float, stall_s: float):
        self._lock = threading.Lock()
        self._stall_s = stall_s
        self._status: dict[str, str] = {}
        self._seen: set[tuple[str, str]] = set()
        # Bytes by layer.
        self._downloaded: dict[str, int] = {}
        self._unpacked: dict[str, int] = {}
        self._totals: dict[str, int] = {}
        self._progress_at, self._progress_bytes = now, 0
        self._phase, self._phase_at = "pull", now

    def take(self, event: dict[str, Any], now: float) -> None:
        layer, status = str(event.get("id")), str(event.get("status"))
        with self._lock:
            if "progressDetail" in event:
                self._status[layer] = status
                self._count(layer, status, event["progressDetail"])
            kind = (layer, re.sub(r"\d+", "#", status))  # "Retrying in 5 seconds", "in 4 seconds"
            bytes_now = sum(self._downloaded.values()) + sum(self._unpacked.values())
            least = PULL_LEAST_BYTES_PER_S * self._stall_s if self._is_downloading() else 1
            if kind not in self._seen or bytes_now - self._progress_bytes >= least:
                self._progress_at, self._progress_bytes = now, bytes_now
            self._seen.add(kind)

    def _count(self, layer: str, status: str, value: object) -> None:
        detail = value if isinstance(value, dict) else {}
        current, total = detail.get("current"), detail.get("total")
        if isinstance(total, int) and total > 0:
            self._totals[layer] = total
        counted = self._unpacked if status == _UNPACKING else self._downloaded
        if status == _DOWNLOADED:
            current = self._totals.get(layer)
        # With units it is seconds, not bytes; a retried layer starts again below the maximum.
        if isinstance(current, int) and not detail.get("units"):
            counted[layer] = max(current, counted.get(layer, 0))

    def _is_downloading(self) -> bool:
        return not self._status or not _LOCAL.issuperset(self._status.values())

    def stalled(self, now: float) -> str | None:
        with self._lock:
            idle_s = now - self._progress_at
            if not self._is_downloading():
                minutes = f"{_UNPACK_LIMIT_S / 60:.0f} minutes"
                message = f"docker has all bytes, but made no progress for {minutes}"
                return message if idle_s > max(_UNPACK_LIMIT_S, self._stall_s) else None
            if idle_s <= self._stall_s:
                return None
            waiting = [name for name, at in sorted(self._status.items()) if at not in _LOCAL]
            layer = f" of layer {waiting[0]}" if waiting else ""
            size = f"{sum(self._downloaded.values()) / 1e6:,.1f} MB"
            return f"the pull stalls: nothing{layer} came in {idle_s:.0f} s, after {size}"

    def progress(self, now: float) -> Progress:
        """Return the progress; the total is known once each layer has reported a size."""
        with self._lock:
            downloading = self._is_downloading()
            phase = "pull" if downloading else "unpack"
            counted = self._downloaded if downloading else self._unpacked
            if phase != self._phase:
                self._phase, self._phase_at = phase, now
            new = [name for name, status in self._status.items() if status != _EXISTS]
            known = new and all(name in self._totals for name in new)
            total = sum(self._totals[name] for name in new) if known else None
            done = sum(counted.values())
            rate = round(done / max(now - self._phase_at, 1.0)) if downloading else None
            left_s = round((total - done) / rate) if total and rate else None
            return Progress(phase, done if counted else None, total, rate, left_s)


def pull(reference: str, *, stall_s: float = PULL_STALL_S) -> None:
    """Pull an image by name and digest.

    Raises:
        HostToolError: docker or the registry failed, or the pull stalls.
    """
    watched = _WatchedPull(reference, stall_s)
    try:
        with watched:
            for event in watched.events():
                _refuse_error(reference, event)
                watched.layers.take(event, time.monotonic())
    except (OSError, HTTPException) as error:
        if watched.stalled is not None:
            raise watched.stalled from error
        reason = getattr(error, "strerror", None) or "the connection ended"
        message = f"docker's daemon is away, or broke the pull off ({reason.lower()})"
        fix = f"systemctl status docker; {_RUN_AGAIN}"
        raise HostToolError(reference, message, fix) from error
    if watched.stalled is not None:
        raise watched.stalled
    if docker.image(reference) is None:
        message = "docker finished the pull without an error and without the image"
        raise HostToolError(reference, message, _RUN_AGAIN)


class _WatchedPull:
    """A pull request to docker; a thread reports progress and hangs up when it stalls."""

    def __init__(self, reference: str, stall_s: float):
        self.layers = Layers(time.monotonic(), stall_s)
        self.stalled: HostToolError | None = None
        self._reference = reference
        self._connection = docker.connection(docker.PATIENT_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _WatchedPull:
        self._connection.connect()
        self._connection.sock.settimeout(None)  # from here on the thread enforces the limit
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up, so that docker cancels the pull."""
        self._ended.set()
        self._thread.join()
        self._connection.close()

    def events(self) -> Iterator[dict[str, Any]]:
        name, tag = _name_and_tag(self._reference)
        auth = registry_auth(self._reference)
        path = f"/images/create?{urlencode({'fromImage': name, 'tag': tag})}"
        headers = {"X-Registry-Auth": auth} if auth else {}
        self._connection.request("POST", path, headers=headers)
        with self._connection.getresponse() as response:
            yield from _parse_events(response)
            if response.status != 200:
                message = f"docker answers with status {response.status}"
                raise HostToolError(self._reference, message, _RUN_AGAIN)

    def _watch(self) -> None:
        reported_at = 0.0
        while not self._ended.wait(_POLL_S):
            now = time.monotonic()
            if now - reported_at >= _REPORT_S:
                log(self.layers.progress(now).line())
                reported_at = now
            message = self.layers.stalled(now)
            if message is not None:
                fix = f"check the registry and the network to it; {_RUN_AGAIN}"
                self.stalled = HostToolError(self._reference, message, fix)
                with suppress(OSError):
                    self._connection.sock.shutdown(socket.SHUT_RDWR)
                return


def _name_and_tag(reference: str) -> tuple[str, str]:
    name, _, digest = reference.partition("@")
    folder, slash, last = name.rpartition("/")
    last, _, tag = last.partition(":")
    return f"{folder}{slash}{last}", digest or tag or "latest"


def _parse_events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line of an answer; skip malformed and overlong lines.

    Skipping is safe: whether the image exists is checked afterwards.
    """
    line, too_long = b"", False
    while chunk := response.read1(1 << 16):
        *complete, rest = (line + chunk).split(b"\n")
        for text in complete:
            if not too_long:
                yield from _parse_event(text)
            too_long = False
        too_long = too_long or len(rest) > _LINE_BYTES
        line = b"" if too_long else rest
    yield from _parse_event(line)


def _parse_event(line: bytes) -> Iterator[dict[str, Any]]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return
    if isinstance(event, dict):
        yield event


def _refuse_error(reference: str, event: dict[str, Any]) -> None:
    """Raise docker's error; an error in the middle of a pull comes with status 200."""
    detail = event.get("errorDetail")
    reason = detail.get("message") if isinstance(detail, dict) else None
    reason = reason or event.get("error") or ("status" not in event and event.get("message"))
    if reason:
        fix = "check the registry's address, the login and the network; `journalctl -u docker`"
        raise HostToolError(reference, f"docker cannot pull it: {_one_line(reason)}", fix)


def _one_line(text: object) -> str:
    start = str(text)[: 4 * _MESSAGE_LENGTH]
    printable = "".join(letter if letter.isprintable() else " " for letter in start)
    return " ".join(printable.split())[:_MESSAGE_LENGTH]


DOCKER_CONFIG = ".docker/config.json"
_HUB_KEY = "https://index.docker.io/v1/"
_HELPER_S = 30.0


def registry_auth(reference: str) -> str | None:
    """Return the ``X-Registry-Auth`` header for an image from the login of root's docker client.

    The login never enters arguments, logs or errors. Without a login (``None``) docker pulls
    anonymously.
    """
    host = parse_reference(reference).host
    environment = docker.client_environment()
    try:
        config = json.loads((Path(environment["HOME"]) / DOCKER_CONFIG).read_text())
        key = _HUB_KEY if host == DOCKER_HUB else host
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
        done = subprocess.run(
            [f"docker-credential-{name}", "get"], input=key, capture_output=True, text=True,
            env=environment, timeout=_HELPER_S, check=False,
        )  # fmt: skip
        answer = json.loads(done.stdout) if done.returncode == 0 else {}
        user, secret = answer.get("Username"), answer.get("Secret")
        if user and secret:
            token = {"identitytoken": str(secret)}
            return token if user == "<token>" else {"username": user, "password": secret}
    return None


def _file_login(config: Mapping[str, Any], key: str) -> dict[str, str] | None:
    logins = config.get("auths") or {}
    login = logins.get(key) or next((logins[name] for name in logins if _host(name) == key), None)
    if not login:
        return None
    if login.get("identitytoken"):
        return {"identitytoken": login["identitytoken"]}
    user, _, password = base64.b64decode(login.get("auth") or "").decode().partition(":")
    return {"username": user, "password": password.rstrip("\0")} if user else None


def _host(key: str) -> str:
    return key.partition("://")[2].partition("/")[0] if "://" in key else key.partition("/")[0]
