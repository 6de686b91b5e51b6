"""The little we ask of Docker: its API socket for questions, its client for actions."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import quote

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.records import GpuProof
from spark_contract.units import DIGEST_LABEL, RELEASE_LABEL, SERVICE_LABEL

from spark_host.system.programs import finished

API_SOCKET = "/var/run/docker.sock"
PATIENT_S = 60.0  # a busy host's daemon answers late; it is asked once more for so long


class DaemonSilent(HostToolError):  # noqa: N818 - named after what happened
    """The daemon is there but did not answer in time: what it knows is unknown, not absent."""


class _SocketConnection(HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str, timeout_s: float):
        super().__init__("docker", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def connection(timeout_s: float) -> HTTPConnection:
    """Return a way to ask the daemon that is not open yet."""
    return _SocketConnection(os.environ.get("SPARK_DOCKER_SOCKET", API_SOCKET), timeout_s)


def ask(path: str, timeout_s: float = 10) -> Any:
    """Return the JSON answer of the daemon to ``GET path``; ``None`` when there is none.

    A daemon that is late is asked once more, with patience.

    Raises:
        DaemonSilent: it took the question and did not answer.
    """
    for limit_s in (timeout_s, PATIENT_S):
        try:
            return _answer(path, limit_s)
        except (TimeoutError, BlockingIOError):
            continue
    raise DaemonSilent(
        "docker", f"did not answer within {PATIENT_S:.0f} s", "systemctl status docker; run again"
    )


def _answer(path: str, timeout_s: float) -> Any:
    asked = connection(timeout_s)
    try:
        asked.request("GET", path)
        answer = asked.getresponse()
        body = answer.read()
        return json.loads(body) if answer.status == 200 else None
    except (TimeoutError, BlockingIOError):
        raise
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        asked.close()


def gpu_arguments(paths: Paths) -> tuple[str, ...]:
    """Return the arguments with which a container was proven to see the GPU of this host."""
    absent = "does not say how a container gets at the GPU"
    return files.load(GpuProof, paths.gpu_receipt, absent).docker_arguments


def gpu_problem(paths: Paths) -> HostToolError | None:
    """Return why no engine can be given the GPU; ``None`` when that was proven."""
    try:
        gpu_arguments(paths)
    except HostToolError as error:
        return error
    return None


def is_up() -> bool:
    """Return whether the daemon answers at once."""
    try:
        return _answer("/version", 5) is not None
    except (TimeoutError, BlockingIOError):
        return False


def image(reference: str) -> dict[str, Any] | None:
    """Return what the daemon knows of an image (tag, or name@digest)."""
    found = ask(f"/images/{quote(reference, safe='/:@')}/json")
    return found if isinstance(found, dict) else None


def image_label(reference: str) -> str | None:
    """Return the digest that labels an image; ``None`` when the image or the label is absent."""
    config = (image(reference) or {}).get("Config") or {}
    value = (config.get("Labels") or {}).get(DIGEST_LABEL)
    return None if value is None else str(value)


def engine_containers(service: str | None = None) -> list[str]:
    """Return the names of all containers of ours, or of one service's, running or not."""
    label = RELEASE_LABEL if service is None else f"{SERVICE_LABEL}={service}"
    chosen = quote(json.dumps({"label": [label]}))
    found = ask(f"/containers/json?all=1&filters={chosen}")
    if not isinstance(found, list):
        return []
    return sorted(str(item["Names"][0]).lstrip("/") for item in found if item.get("Names"))


def container(name: str, limit_s: float) -> dict[str, Any] | None:
    """Return what the daemon knows of a container; ``None`` when it does not say so in time."""
    try:
        found = _answer(f"/containers/{quote(name, safe='')}/json", limit_s)
    except (TimeoutError, BlockingIOError):
        return None
    return found if isinstance(found, dict) else None


def client_environment() -> dict[str, str]:
    """Return all that the docker client needs to know: no other daemon, no other configuration."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/root", "LC_ALL": "C.UTF-8"}


def client(*words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the docker client and return what it said; the caller judges the exit code."""
    return finished(["docker", *words], timeout_s, client_environment())


def remove_container(name: str) -> None:
    """Remove a container, running or not; an absent one is fine."""
    client("rm", "-f", name)
