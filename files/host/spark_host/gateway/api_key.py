"""The API key of a service: made on the host unless the controller sends one."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.gateway import Gateway
from spark_contract.paths import Paths

_USABLE = re.compile(r"^[A-Za-z0-9._~+/=-]{16,512}\Z")


def make(settings: Gateway, paths: Paths) -> None:
    """Have an API key on this host; one that is there is kept."""
    path = path_of(settings, paths)
    if path.exists():
        os.chmod(path, 0o600)
    else:
        replace(settings, paths)


def replace(settings: Gateway, paths: Paths) -> None:
    """Put a new random key in the place of the old one."""
    files.write_text(path_of(settings, paths), secrets.token_urlsafe(32) + "\n", 0o600)


def read(settings: Gateway, paths: Paths) -> str:
    """Return the API key.

    Raises:
        HostToolError: It is missing, readable by others, or not usable in a header.
    """
    path = path_of(settings, paths)
    try:
        mode, key = path.stat().st_mode, path.read_text().strip()
    except FileNotFoundError as error:
        raise HostToolError(str(path), "no API key", "run the deploy again") from error
    if mode & 0o077:
        raise HostToolError(str(path), "is readable by others", f"chmod 600 {path}")
    if not _USABLE.match(key):
        raise HostToolError(
            str(path),
            "not a usable key (16 to 512 letters, digits or . _ ~ + / = -)",
            f"remove {path} and run the deploy: it makes a new one",
        )
    return key


def path_of(settings: Gateway, paths: Paths) -> Path:
    """Return where the key lies."""
    return paths.below(settings.key_path)
