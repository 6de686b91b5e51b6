"""Reads and compares versions of kernel, driver and Docker, and suggests how to restore them."""

import os
import platform
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spark_contract import machine
from spark_contract.release import Release

from spark_host.system import docker
from spark_host.system.programs import ProgramTimeoutError, read_output, read_output_with_retry

UNKNOWN = "unknown"  # the version of a program that did not respond in time
_PROGRAMS = {"docker": "dockerd", "toolkit": "nvidia-ctk"}


def read() -> dict[str, str]:
    """Return versions by component: "" if absent, ``UNKNOWN`` if a program did not respond."""
    with ThreadPoolExecutor(max_workers=3) as pool:
        pending = {name: pool.submit(read_or_unknown, reader) for name, reader in _READERS.items()}
        versions = {name: future.result() for name, future in pending.items()}
    return {"kernel": os.uname().release, **versions}


def read_or_unknown(reader: Callable[[], str]) -> str:
    try:
        return reader()
    except (docker.DockerTimeoutError, ProgramTimeoutError):
        return UNKNOWN


def release_versions(release: Release) -> dict[str, str]:
    return {"image": release.image.base, "plugin": release.image.plugin}


def read_driver() -> str:
    loaded = Path("/proc/driver/nvidia/version")
    if loaded.is_file():
        # "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.159.03  Release Build"
        return _find_version(loaded.read_text().splitlines()[0])
    args = ("--query-gpu=driver_version", "--format=csv,noheader")
    output = read_output_with_retry("nvidia-smi", *args)
    return output.splitlines()[0].strip() if output else ""


_READERS: dict[str, Callable[[], str]] = {
    "driver": read_driver,
    "docker": lambda: str((docker.query("/version", 5) or {}).get("Version", "")),
    "toolkit": lambda: _find_version(read_output_with_retry("nvidia-ctk", "--version") or ""),
}


def _find_version(text: str) -> str:
    match = re.search(r"\b\d+\.\d+(\.\d+)*\S*", text)
    return match[0] if match else ""


def describe_changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return ``name old -> new`` for each changed version; ignore versions that are unknown now."""
    return [
        f"{key} {before.get(key) or 'none'} -> {now[key] or 'none'}"
        for key in now
        if now[key] not in (UNKNOWN, before.get(key, ""))
    ]


def read_packages() -> dict[str, str]:
    """Return ``package=version`` of the package that contains each installed program."""
    installed = {}
    for part, program in _PROGRAMS.items():
        path = shutil.which(program)
        owner = (path and read_output("dpkg-query", "-S", os.path.realpath(path))) or ""
        # "package, other-package: path" or "package:architecture: path"
        name = owner.partition(":")[0].partition(",")[0].strip()
        version = name and read_output("dpkg-query", "-W", "-f", "${Version}", name)
        if version:
            installed[part] = f"{name}={version}"
    return installed


def reboot_pending(root: Path = Path("/")) -> str:
    """Return why the host needs a reboot, or ""."""
    libraries = root.glob(machine.DRIVER_LIBRARIES.lstrip("/"))
    return machine.BootSigns(
        kernel=os.uname().release,
        kernels=tuple(path.name.partition("-")[2] for path in root.glob("boot/vmlinuz-*")),
        has_reboot_marker=(root / machine.REBOOT_MARKER.lstrip("/")).exists(),
        packages=tuple(_read_text(root / machine.REBOOT_PACKAGES.lstrip("/")).split()),
        module=machine.module_version(_read_text(root / machine.DRIVER_MODULE.lstrip("/"))),
        libraries=machine.library_versions(path.name for path in libraries),
    ).reboot_reason


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def revert_hints(service: str, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return commands that restore the earlier release and versions."""
    old, new = before["versions"], now["versions"]
    changed = {
        part
        for part in ("docker", "toolkit", "kernel", "driver")
        if UNKNOWN not in (old.get(part), new.get(part)) and old.get(part) != new.get(part)
    }
    hints = []
    if before.get("release") != now.get("release"):
        hints.append(f"run `spark-host rollback {service}` to serve {before.get('release')} again")
    for part in ("docker", "toolkit"):
        package = before.get("packages", {}).get(part)
        if package and part in changed:
            hints.append(f"run `apt-get install --allow-downgrades {package}`, then deploy again")
    if "kernel" in changed:
        system = _distribution_name()
        entry = f"Advanced options for {system}>{system}, with Linux {old.get('kernel')}"
        hints.append(f"run `grub-reboot '{entry}' && reboot` to boot once with the earlier kernel")
    if "driver" in changed:
        hints.append(
            f"restore driver {old.get('driver')} and the matching kernel "
            "with NVIDIA's DGX Dashboard or recovery image; this project never changes drivers"
        )
    return hints


def _distribution_name() -> str:
    try:
        return platform.freedesktop_os_release()["NAME"].removesuffix(" GNU/Linux")
    except (OSError, KeyError):
        return "Ubuntu"
