"""The login for a registry that root's docker client keeps, as docker's API takes it.

It goes from a file into a header: never into arguments, logs or errors.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from spark_contract.images import DOCKER_HUB, parse_reference

from spark_host.system import docker

CONFIG = ".docker/config.json"
_HUB_KEY = "https://index.docker.io/v1/"
_HELPER_S = 30.0


def registry_auth(reference: str) -> str | None:
    """Return the header ``X-Registry-Auth`` for an image; ``None`` where nobody logged in."""
    host = parse_reference(reference).host
    environment = docker.client_environment()
    try:
        config = json.loads((Path(environment["HOME"]) / CONFIG).read_text())
        key = _HUB_KEY if host == DOCKER_HUB else host
        login = _of_helper(config, key, environment) or _of_file(config.get("auths") or {}, key)
    except (OSError, ValueError, AttributeError, TypeError, subprocess.SubprocessError):
        return None  # docker then asks without, and the registry says what it thinks of that
    if not login:
        return None
    return base64.urlsafe_b64encode(json.dumps({**login, "serveraddress": key}).encode()).decode()


def _of_helper(
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
        told = json.loads(done.stdout) if done.returncode == 0 else {}
        user, secret = told.get("Username"), told.get("Secret")
        if user and secret:
            token = {"identitytoken": str(secret)}
            return token if user == "<token>" else {"username": user, "password": secret}
    return None


def _of_file(auths: Mapping[str, Any], key: str) -> dict[str, str] | None:
    found = auths.get(key) or next((one for k, one in auths.items() if _host(k) == key), None)
    if not found:
        return None
    if found.get("identitytoken"):
        return {"identitytoken": found["identitytoken"]}
    user, _, password = base64.b64decode(found.get("auth") or "").decode().partition(":")
    return {"username": user, "password": password.rstrip("\0")} if user else None


def _host(key: str) -> str:
    return key.partition("://")[2].partition("/")[0] if "://" in key else key.partition("/")[0]
