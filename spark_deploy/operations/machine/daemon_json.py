"""Docker's daemon.json: merge our keys into what is there, and see what the daemon runs with.

Keys and which of them a SIGHUP reloads: dockerd reference, "Configuration reload behavior".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

NVIDIA_RUNTIME = {"path": "nvidia-container-runtime", "args": []}

RELOADABLE = frozenset(
    {
        "debug",
        "labels",
        "live-restore",
        "max-concurrent-downloads",
        "max-concurrent-uploads",
        "max-download-attempts",
        "default-runtime",
        "runtimes",
        "insecure-registries",
        "registry-mirrors",
        "shutdown-timeout",
    }
)


def parse(text: str) -> dict[str, Any]:
    """Read a daemon.json; an empty file counts as `{}`.

    Raises:
        ValueError: not JSON, or not an object.
    """
    value = json.loads(text) if text.strip() else {}
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def merged(present: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``present`` with ``wanted`` in it: objects merge, lists unite, values replace."""
    result = dict(present)
    for key, value in wanted.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            result[key] = merged(old, value)
        elif isinstance(old, list) and isinstance(value, (list, tuple)):
            result[key] = [*old, *(item for item in value if item not in old)]
        else:
            result[key] = value
    return result


def with_runtime(present: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``wanted`` and register the NVIDIA runtime unless some path is registered already."""
    result = merged(present, wanted)
    runtimes = result.get("runtimes")
    nvidia = runtimes.get("nvidia") if isinstance(runtimes, dict) else None
    if not (isinstance(nvidia, dict) and (nvidia.get("path") or nvidia.get("runtimeType"))):
        result = merged(result, {"runtimes": {"nvidia": NVIDIA_RUNTIME}})
    return result


def render(value: Mapping[str, Any]) -> str:
    """Write it as nvidia-ctk and people do: four blanks, keys in their order."""
    return json.dumps(value, indent=4) + "\n"


def unmet(wanted: Mapping[str, Any], info: Mapping[str, Any]) -> tuple[str, ...]:
    """List the keys of ``wanted`` that the running daemon does not run with.

    Args:
        wanted: keys of ours, as merged into the file.
        info: `docker info --format '{{json .}}'` of the daemon.

    Keys `docker info` does not show are not judged here.
    """
    return tuple(key for key, value in wanted.items() if not _runs_with(key, value, info))


def visible(key: str) -> bool:
    """Whether `docker info` shows what became of a key."""
    return key in _VISIBLE


def _runs_with(key: str, value: Any, info: Mapping[str, Any]) -> bool:
    return _VISIBLE[key](value, info) if key in _VISIBLE else True


def _insecure(value: Any, info: Mapping[str, Any]) -> bool:
    registry = info.get("RegistryConfig") or {}
    networks = registry.get("InsecureRegistryCIDRs") or []
    indexes = registry.get("IndexConfigs") or {}
    insecure = {name for name, index in indexes.items() if not index.get("Secure", True)}
    return all(name in insecure or name in networks for name in value)


def _mirrors(value: Any, info: Mapping[str, Any]) -> bool:
    mirrors = {
        mirror.rstrip("/") for mirror in (info.get("RegistryConfig") or {}).get("Mirrors") or []
    }
    return all(mirror.rstrip("/") in mirrors for mirror in value)


_VISIBLE = {
    "runtimes": lambda value, info: set(value) <= set(info.get("Runtimes") or {}),
    "default-runtime": lambda value, info: info.get("DefaultRuntime") == value,
    "live-restore": lambda value, info: info.get("LiveRestoreEnabled") == value,
    "debug": lambda value, info: info.get("Debug") == value,
    "log-driver": lambda value, info: info.get("LoggingDriver") == value,
    "data-root": lambda value, info: info.get("DockerRootDir") == value,
    "storage-driver": lambda value, info: info.get("Driver") == value,
    "insecure-registries": _insecure,
    "registry-mirrors": _mirrors,
}
