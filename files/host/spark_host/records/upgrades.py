"""What changed on the host since the last proof, and how to go back."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

from spark_contract.machine import (
    DRIVER_LIBRARIES,
    DRIVER_MODULE,
    REBOOT_MARKER,
    REBOOT_PACKAGES,
    BootSigns,
    library_versions,
    module_version,
)

from spark_host.system.programs import output_of

UNKNOWN = "unknown"  # stands for a version whose program did not answer
# The program whose package a version belongs to.
_PROGRAMS = {"docker": "dockerd", "toolkit": "nvidia-ctk"}


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return one ``name old -> new`` for each version that differs, as far as it is known now.

    A proof that was taken without knowing a version does not cover the one that is found later.
    """
    return [
        f"{key} {before.get(key) or 'none'} -> {now[key] or 'none'}"
        for key in now
        if now[key] not in (UNKNOWN, before.get(key, ""))
    ]


def unknown(now: dict[str, str]) -> list[str]:
    """Return the names of the parts that did not answer."""
    return [key for key, version in now.items() if version == UNKNOWN]


def packages() -> dict[str, str]:
    """Return ``name=version`` of the packages that docker and toolkit come from.

    That is what apt wants to hear to go back to them; a program of no package is left out.
    """
    found = {}
    for part, program in _PROGRAMS.items():
        path = shutil.which(program)
        owner = (path and output_of("dpkg-query", "-S", os.path.realpath(path))) or ""
        name = owner.partition(":")[0].partition(",")[0].strip()
        version = name and output_of("dpkg-query", "-W", "-f", "${Version}", name)
        if version:
            found[part] = f"{name}={version}"
    return found


def reboot_pending(root: Path = Path("/")) -> str:
    """Return why the host waits for a reboot, or an empty string: in files alone, it is quick."""
    named = list(root.glob(DRIVER_LIBRARIES.lstrip("/")))
    return BootSigns(
        kernel=os.uname().release,
        kernels=tuple(path.name.partition("-")[2] for path in root.glob("boot/vmlinuz-*")),
        marked=(root / REBOOT_MARKER.lstrip("/")).exists(),
        packages=tuple(_text(root / REBOOT_PACKAGES.lstrip("/")).split()),
        module=module_version(_text(root / DRIVER_MODULE.lstrip("/"))),
        libraries=library_versions(path.name for path in named),
    ).pending


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def way_back(service: str, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what a person can do to go back from one measurement to another, part by part."""
    old, new = before["versions"], now["versions"]
    found = []
    if before.get("release") != now.get("release"):
        found.append(f"`spark-host rollback {service}` serves {before.get('release')} again")
    for part in ("docker", "toolkit"):
        package = before.get("packages", {}).get(part)
        if package and _differs(old, new, part):
            found.append(f"`apt-get install --allow-downgrades {package}`, then deploy again")
    if _differs(old, new, "kernel"):
        entry = f"Advanced options for {_system()}>{_system()}, with Linux {old.get('kernel')}"
        found.append(f"`grub-reboot '{entry}' && reboot` boots the earlier kernel once")
    if _differs(old, new, "driver"):
        found.append(
            f"driver {old.get('driver')} comes back only as a whole set with its kernel, by the "
            "vendor's means (DGX Dashboard, recovery image); this tool never changes it"
        )
    return found


def _differs(old: dict[str, str], new: dict[str, str], part: str) -> bool:
    return UNKNOWN not in (old.get(part), new.get(part)) and old.get(part) != new.get(part)


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["NAME"].removesuffix(" GNU/Linux")
    except (OSError, KeyError):
        return "Ubuntu"
