"""Which packages were installed by us and may go: never one that was there, or that others need."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from spark_contract import files
from spark_contract.keep import Before, Footprint, Thing
from spark_contract.paths import Paths, kept_aside

from spark_host.system import docker, systemd
from spark_host.uninstall.baseline import content_of, installed, told

_ENGINE_STAYS = "others may use it by now; --data uninstall.engine=true removes it"
# Installed by us without being started; who starts it has found a use of his own.
_QUIET = {"nginx-light": "nginx.service"}


def package_things(
    wanted: Footprint, before: Before | None, in_the_way: Mapping[str, str]
) -> list[Thing]:
    """List the packages of our settings that were not there before us.

    Args:
        wanted: their names.
        before: what was there; without it no package is known to be ours.
        in_the_way: by package, why it must stay whatever is asked for.
    """
    here, engine = set(installed()), (*wanted.engine_packages, *wanted.gpu_packages)
    asked = [name for name in (*wanted.packages, *engine) if name in here]
    if before is None:
        return [Thing("package", name, 0, "nobody noted whether it was there before")
                for name in asked]  # fmt: skip
    ours = [name for name in asked if name not in before.packages]
    found = []
    for name in ours:
        stays = _used(name) or _needed(name, ours, before)
        if name in engine:
            stays = stays or in_the_way.get(name) or ("" if wanted.engine else _ENGINE_STAYS)
        found.append(Thing("package", name, _size_bytes(name), stays))
    going = [thing.name for thing in found if not thing.stays]
    came_along = sorted((_removed(going, auto=True) - set(before.packages)) - set(going))
    alone = [name for name in came_along if not _outside([*going, *came_along], name)]
    return [*found, *(Thing("package", name, _size_bytes(name)) for name in alone)]


def remove(names: Iterable[str]) -> str:
    """Purge packages; return what went wrong."""
    listed = list(names)
    told("apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120", "purge", *listed)
    left = set(listed) & set(installed())
    return f"packages still there: {', '.join(sorted(left))}" if left else ""


def _used(name: str) -> str:
    unit = _QUIET.get(name)
    if unit is None:
        return ""
    state = systemd.state(unit, "ActiveState", "UnitFileState")
    used = state.get("ActiveState") == "active" or state.get("UnitFileState") == "enabled"
    return f"{unit} is in use" if used else ""


def _needed(name: str, ours: list[str], before: Before) -> str:
    """Say which package that is not ours would go along."""
    others = _removed([name], auto=False) - set(ours)
    strangers = sorted(other for other in others if other in before.packages or _by_hand(other))
    return f"{', '.join(strangers)} needs it" if strangers else ""


def _outside(going: list[str], name: str) -> bool:
    """Whether something beside ``going`` would go with a package that came along."""
    return bool(_removed([name], auto=False) - set(going))


def _by_hand(name: str) -> bool:
    return told("apt-mark", "showmanual", name).strip() == name


def _removed(names: list[str], *, auto: bool) -> set[str]:
    """Ask apt what would go with ``names``; ``auto``: with what nothing needs any more."""
    if not names:
        return set()
    words = ["--auto-remove"] if auto else []
    lines = told("apt-get", "-s", "-q", *words, "purge", *names).splitlines()
    gone = (line.split() for line in lines if line.startswith(("Remv ", "Purg ")))
    return {words[1].partition(":")[0] for words in gone}


def _size_bytes(name: str) -> int:
    said = told("dpkg-query", "-W", "-f", "${Installed-Size}\n", name).split()
    return int(said[0]) * 1024 if said and said[0].isdigit() else 0


_UNKNOWN = "what it was before us was not noted; take our part out by hand"


def shared_things(
    wanted: Footprint, before: Before | None, stays: str, paths: Paths
) -> list[Thing]:
    """List what we changed in files of others.

    Args:
        wanted: which files.
        before: what stood in them.
        stays: why Docker's settings stay; empty when they go.
        paths: where to look.
    """
    found = []
    for path in wanted.shared_files:
        now = content_of(paths.below(path))
        was = _was(path, wanted, before, paths)
        if now is None or now == was:
            continue
        known = before is not None or was is not None
        why = "" if known else _UNKNOWN
        if path == wanted.daemon_json:
            if _without_ours(now, was, wanted) == _data(now):
                continue
            why = why or stays
        found.append(Thing("settings", path, 0, why))
    aside = paths.below(kept_aside(wanted.daemon_json))
    if aside.exists() and not any(thing.stays for thing in found):
        found.append(Thing("file", str(aside)))
    return found


def restore(path: str, wanted: Footprint, before: Before | None, paths: Paths) -> None:
    """Put a file back: daemon.json without our keys, any other as it was."""
    was, here = _was(path, wanted, before, paths), paths.below(path)
    if path == wanted.daemon_json:
        left = _without_ours(content_of(here) or "", was, wanted)
        if left != _data(was or ""):
            was = json.dumps(left, indent=4) + "\n"
    if was is None:
        files.remove(here)
    else:
        files.write_text(here, was)
    if path == wanted.daemon_json and docker.is_up():
        # A reload ends no container; what it does not cover holds from docker's next start.
        systemd.systemctl("reload", "docker")


def _was(path: str, wanted: Footprint, before: Before | None, paths: Paths) -> str | None:
    if before is not None:
        return before.files.get(path)
    return (
        content_of(paths.below(kept_aside(wanted.daemon_json)))
        if path == wanted.daemon_json
        else None
    )


def _without_ours(now: str, was: str | None, wanted: Footprint) -> dict[str, Any]:
    """Return daemon.json with our keys as they were; what others set since stays."""
    here, then = _data(now), _data(was or "")
    left = {key: value for key, value in here.items() if key not in wanted.daemon_keys}
    return left | {key: then[key] for key in wanted.daemon_keys if key in then}


def _data(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
