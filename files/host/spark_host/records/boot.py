"""Which release may run: the boot pointer (enabled unit), the good record, the stop marker."""

from __future__ import annotations

from typing import Any

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.release import Release, load, names, service_of

from spark_host.system import systemd

_KEPT = 10


def enabled(service: str, paths: Paths) -> list[str]:
    """Return the releases of a service that systemd starts at boot."""
    directory = paths.units / "multi-user.target.wants"
    if not directory.is_dir():
        return []
    found = []
    for link in directory.glob("spark-serve@*.service"):
        name = link.name.removeprefix("spark-serve@").removesuffix(".service")
        try:
            if service_of(name) == service:
                found.append(name)
        except HostToolError:
            continue
    return sorted(found)


def good(service: str, paths: Paths) -> dict[str, Any]:
    """Return the record of proven releases: ``{"release", "previous": [...]}``."""
    return files.read_json(paths.good(service)) or {"release": None, "previous": []}


def record_good(release: Release, paths: Paths) -> None:
    """Record the release as the last good one, the one before it as the way back."""
    before = good(release.service, paths)
    previous = [name for name in (before["release"], *before["previous"]) if name]
    kept = [name for name in dict.fromkeys(previous) if name != release.name][:_KEPT]
    found = {"release": release.name, "previous": kept, "at": files.now()}
    try:
        files.write_json(paths.good(release.service), found)
    except OSError:
        # A full disk does not keep a host from what it boots anyway.
        if before["release"] != release.name:
            raise
    _settle_rollback(release, paths)


def withdraw_good(release: Release, since: str, paths: Paths) -> None:
    """Take back a good record that a failed trial wrote: what does not serve is not started again.

    Args:
        release: The candidate.
        since: When the trial began, as :func:`files.now` writes it; an older record stays.
        paths: Where the record is.
    """
    found = good(release.service, paths)
    if found["release"] != release.name or found["at"] < since:
        return
    previous: list[str] = found["previous"]
    files.write_json(
        paths.good(release.service),
        {**found, "release": previous[0] if previous else None, "previous": previous[1:]},
    )


def enable_only(release: Release, paths: Paths) -> None:
    """Make the release the one that boots.

    The order is what makes a power cut harmless: the good record first, then the new link, then
    the old link away. With both links there, :func:`obstacle` lets only the good one start.
    """
    record_good(release, paths)
    _systemctl("enable", release.serve_unit)
    for name in enabled(release.service, paths):
        if name != release.name:
            _systemctl("disable", f"spark-serve@{name}.service")


def obstacle(release: Release, paths: Paths) -> str | None:
    """Return why the unit of this release must not start now, or ``None``."""
    if paths.stopped(release.service).exists():
        return f"service {release.service} was stopped by hand (spark-host start-service)"
    rivals = enabled(release.service, paths)
    if release.name in rivals and len(rivals) > 1:
        chosen = good(release.service, paths)["release"]
        if chosen in rivals and chosen != release.name:
            return f"{chosen} is the last good release"
    return None


def active(service: str, paths: Paths) -> str | None:
    """Return the release of a service whose unit is up or coming up, if any."""
    mine = [name for name in names(paths) if service_of(name) == service]
    units = systemd.show([f"spark-serve@{name}.service" for name in mine], ["ActiveState"])
    for name in mine:
        state = units.get(f"spark-serve@{name}.service", {}).get("ActiveState")
        if state in ("active", "activating", "reloading"):
            return name
    return None


def stop_service(service: str, by: str, paths: Paths) -> int:
    """Stop a service for good: it stays down over reboots until someone starts it again."""
    running = active(service, paths)
    boots = enabled(service, paths)
    chosen = good(service, paths)["release"]
    marker = files.read_json(paths.stopped(service)) or {}
    release = running or (boots[0] if boots else None) or chosen or marker.get("release")
    # The marker alone keeps it down: whatever is interrupted below, no boot starts it.
    since = marker.get("at") or files.now()
    files.write_json(
        paths.stopped(service),
        {"release": release, "at": since, "by": marker.get("by") or by},
    )
    for name in {*boots, *([running] if running else [])}:
        _systemctl("stop", f"spark-serve@{name}.service", timeout_s=900)
    print(f"{service}: stopped; it stays down until someone starts it: spark-deploy start")
    return 0


def start_service(service: str, paths: Paths) -> int:
    """Take back a stop by hand and start the last good release."""
    marker = files.read_json(paths.stopped(service)) or {}
    chosen = good(service, paths)["release"] or marker.get("release")
    files.remove(paths.stopped(service))
    if chosen is None:
        raise HostToolError(service, "no proven release to start", "run the deploy for this host")
    release = load(chosen, paths)
    systemd.systemctl("reset-failed", release.serve_unit)
    _systemctl("start", release.serve_unit, timeout_s=release.timeouts.start_s + 900)
    print(f"{service}: {chosen} is up")
    return 0


def rolled_back(service: str, paths: Paths) -> dict[str, Any] | None:
    """Return from, to and time of the rollback that brought the current release, if one did."""
    found = files.read_json(paths.rollback(service)) or {}
    if found.get("state") == "done" and found.get("to") == good(service, paths)["release"]:
        return {key: found[key] for key in ("from", "to", "at")}
    return None


def note_rollback(service: str, target: str, paths: Paths) -> None:
    """Remember that the change about to begin is a way back."""
    files.write_json(
        paths.rollback(service),
        {
            "state": "asked",
            "from": good(service, paths)["release"],
            "to": target,
            "at": files.now(),
        },
    )


def _settle_rollback(release: Release, paths: Paths) -> None:
    """A way back is gone once its release is good; any other good release ends the matter."""
    found = files.read_json(paths.rollback(release.service))
    if found is None:
        return
    if found.get("to") != release.name:
        files.remove(paths.rollback(release.service))
    elif found.get("state") == "asked":
        files.write_json(paths.rollback(release.service), {**found, "state": "done"})


def _systemctl(verb: str, unit: str, timeout_s: float = 120) -> None:
    said = systemd.systemctl(verb, unit, timeout_s=timeout_s)
    if said.returncode != 0:
        raise HostToolError(
            f"systemctl {verb} {unit}", said.stderr.strip() or "failed", f"journalctl -u {unit}"
        )
