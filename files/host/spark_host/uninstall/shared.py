"""Files that somebody may have had before us: only our part of them goes."""

from __future__ import annotations

import json
from typing import Any

from spark_contract import files
from spark_contract.host.paths import Paths, kept_aside
from spark_contract.work.keep import Before, Footprint, Thing

from spark_host.system import docker, systemd
from spark_host.uninstall.before import content_of

_UNKNOWN = "what it was before us was not noted; take our part out by hand"


def things(wanted: Footprint, before: Before | None, stays: str, paths: Paths) -> list[Thing]:
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
