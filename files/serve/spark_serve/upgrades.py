"""What changed on the host since the last proof, and how to go back."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from typing import Any

# The program whose package a version belongs to.
_PROGRAMS = {"docker": "dockerd", "toolkit": "nvidia-ctk"}


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return one ``name old -> new`` for each version that differs."""
    return [
        f"{key} {before.get(key) or 'none'} -> {now[key] or 'none'}"
        for key in now
        if before.get(key, "") != now[key]
    ]


def packages() -> dict[str, str]:
    """Return ``name=version`` of the packages that docker and toolkit come from.

    That is what apt wants to hear to go back to them; a program of no package is left out.
    """
    found = {}
    for part, program in _PROGRAMS.items():
        path = shutil.which(program)
        owner = _dpkg("-S", os.path.realpath(path)) if path else ""
        name = owner.partition(":")[0].partition(",")[0].strip()
        version = _dpkg("-W", "-f", "${Version}", name) if name else ""
        if version:
            found[part] = f"{name}={version}"
    return found


def way_back(service: str, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what a person can do to go back, one sentence for each part that changed.

    Args:
        service: The service that got slower.
        before: Measurement of the last proof, with ``versions``, ``packages``, ``release``.
        now: The same of the present one.
    """
    old, new = before["versions"], now["versions"]
    found = []
    if before.get("release") != now.get("release"):
        found.append(f"`spark-host rollback {service}` serves {before.get('release')} again")
    for part in ("docker", "toolkit"):
        package = before.get("packages", {}).get(part)
        if package and old.get(part) != new.get(part):
            found.append(f"`apt-get install --allow-downgrades {package}`, then deploy again")
    if old.get("kernel") != new.get("kernel"):
        entry = f"Advanced options for {_system()}>{_system()}, with Linux {old.get('kernel')}"
        found.append(f"`grub-reboot '{entry}' && reboot` boots the earlier kernel once")
    if old.get("driver") != new.get("driver"):
        found.append(
            f"driver {old.get('driver')} comes back only as a whole set with its kernel, by the "
            "vendor's means (DGX Dashboard, recovery image); this tool never changes it"
        )
    return found


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["NAME"].removesuffix(" GNU/Linux")
    except (OSError, KeyError):
        return "Ubuntu"


def _dpkg(*words: str) -> str:
    try:
        said = subprocess.run(
            ["dpkg-query", *words],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""
