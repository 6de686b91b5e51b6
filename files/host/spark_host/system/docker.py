"""Queries docker through its API socket; changes containers and images with its client."""

import json
import os
import socket
import subprocess
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import quote

from spark_contract import files
from spark_contract.paths import Paths
from spark_contract.records import GpuProof
from spark_contract.tool import HostToolError
from spark_contract.units import DIGEST_LABEL, RELEASE_LABEL, SERVICE_LABEL

from spark_host.system.programs import run_program

API_SOCKET = "/var/run/docker.sock"
RETRY_TIMEOUT_S = 60.0  # the second try, for busy hosts


class DockerTimeoutError(HostToolError):
    """The daemon did not respond in time, so the result is unknown."""


class _SocketConnection(HTTPConnection):
    def __init__(self, path: str, timeout_s: float):
        super().__init__("docker", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def connection(timeout_s: float) -> HTTPConnection:
    return _SocketConnection(os.environ.get("SPARK_DOCKER_SOCKET", API_SOCKET), timeout_s)


def query(path: str, timeout_s: float = 10) -> Any:
    """Return the JSON response to ``GET path``, ``None`` on errors; raise after two timeouts."""
    try:
        return _get(path, timeout_s)
    except DockerTimeoutError:
        return _get(path, RETRY_TIMEOUT_S)


def _get(path: str, timeout_s: float) -> Any:
    docker = connection(timeout_s)
    try:
        docker.request("GET", path)
        response = docker.getresponse()
        body = response.read()
        return json.loads(body) if response.status == 200 else None
    except (TimeoutError, BlockingIOError) as error:
        message = f"did not respond within {timeout_s:.0f} s"
        fix = "see `systemctl status docker`, then run the command again"
        raise DockerTimeoutError("docker", message, fix) from error
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        docker.close()


def gpu_arguments(paths: Paths) -> tuple[str, ...]:
    """Return the proven docker arguments for the GPU, or raise ``HostToolError``."""
    problem = "no container has used the GPU successfully"
    return files.load(GpuProof, paths.gpu_receipt, problem).docker_arguments


def is_up() -> bool:
    try:
        return _get("/version", 5) is not None
    except DockerTimeoutError:
        return False


def inspect_image(reference: str) -> dict[str, Any] | None:
    result = query(f"/images/{quote(reference, safe='/:@')}/json")
    return result if isinstance(result, dict) else None


def image_label(reference: str) -> str | None:
    config = (inspect_image(reference) or {}).get("Config") or {}
    value = (config.get("Labels") or {}).get(DIGEST_LABEL)
    return None if value is None else str(value)


def engine_containers(service: str | None = None) -> list[str]:
    label = RELEASE_LABEL if service is None else f"{SERVICE_LABEL}={service}"
    filters = quote(json.dumps({"label": [label]}))
    result = query(f"/containers/json?all=1&filters={filters}")
    if not isinstance(result, list):
        return []
    return sorted(str(item["Names"][0]).lstrip("/") for item in result if item.get("Names"))


def inspect_container(name: str, timeout_s: float) -> dict[str, Any] | None:
    try:
        result = _get(f"/containers/{quote(name, safe='')}/json", timeout_s)
    except DockerTimeoutError:
        return None
    return result if isinstance(result, dict) else None


def client_environment() -> dict[str, str]:
    """Return an environment without variables that select another daemon or configuration."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/root", "LC_ALL": "C.UTF-8"}


def client(*args: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return run_program(["docker", *args], timeout_s, client_environment())


def remove_container(name: str) -> None:
    client("rm", "-f", name)


def remove_image(reference: str) -> str:
    result = client("rmi", reference, timeout_s=600)
    if result.returncode == 0 or "No such image" in result.stderr:
        return ""
    return f"image {reference}: {result.stderr.strip()}"
