"""Which release may run: the boot pointer (enabled unit), the good record, the stop marker."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

from spark_contract.errors import HostToolError
from spark_contract.records import GoodReleases, RollbackRecord, Stopped
from spark_contract.release import Release, service_of
from spark_contract.units import GATEWAY, RETURN_TIMER, SERVE

from spark_host.system.host import Host

_KEPT = 10
_STOP_S = 900.0
_TIMER_S = 60.0


def enabled(service: str, host: Host) -> list[str]:
    releases = []
    for link in host.disk.listed(host.paths.boot_links):
        name = SERVE.instance(link)
        try:
            if link == SERVE.unit(name) and service_of(name) == service:
                releases.append(name)
        except HostToolError:
            continue
    return releases


def good(service: str, host: Host) -> GoodReleases:
    return host.disk.read(GoodReleases, host.paths.good(service)) or GoodReleases()


def record_good(release: Release, host: Host) -> None:
    before = good(release.service, host)
    previous = tuple(name for name in dict.fromkeys(before.all) if name != release.name)[:_KEPT]
    record = GoodReleases(release.name, previous, host.clock.now())
    try:
        host.disk.write(host.paths.good(release.service), record)
    except OSError:  # harmless if the record already names this release
        if before.release != release.name:
            raise
    _settle_rollback(release, host)


def withdraw_good(release: Release, host: Host) -> None:
    """Remove a failed candidate from the good record."""
    record = good(release.service, host)
    if record.release == release.name:
        before, *previous = record.previous or (None,)
        others = set(enabled(release.service, host)) - {release.name}
        if others and before not in others:  # if two links exist, one must be the good release's
            return
        record = replace(record, release=before, previous=tuple(previous))
        host.disk.write(host.paths.good(release.service), record)


def enable_only(release: Release, host: Host) -> None:
    """Make only this release start at boot.

    The steps are ordered to be safe across a power cut: if two links exist, only the known-good
    release may start (see :func:`obstacle`).
    """
    others = enabled(release.service, host)
    if others and good(release.service, host).release not in others:
        record_good(release, host)  # if two links exist, one must be the good release's
    host.units.enable(release.serve_unit)
    record_good(release, host)
    for name in enabled(release.service, host):
        if name != release.name:
            host.units.disable(SERVE.unit(name))


def opens_at_start(release: Release, host: Host) -> bool:
    """Return whether the gateway opens after the quick check: not for a candidate."""
    return release.name in enabled(release.service, host)


def is_stopped(service: str, host: Host) -> bool:
    return host.disk.exists(host.paths.stopped(service)) and not waits(service, host)


def waits(service: str, host: Host) -> bool:
    """Return whether the service is stopped until the next request."""
    marker = host.disk.read(Stopped, host.paths.stopped(service))
    return marker is not None and marker.on_request


def stop_until_request(release: Release, host: Host) -> None:
    """Write the marker first: after a power cut the host must not start the service."""
    with _marker_lock(release.service, host):
        if not is_stopped(release.service, host):
            marker = Stopped(release.name, host.clock.now(), on_request=True)
            host.disk.write(host.paths.stopped(release.service), marker)
    host.units.stop(release.serve_unit, _STOP_S)


def allow_start(service: str, host: Host) -> None:
    """Remove the marker of a service that waits for a request."""
    with _marker_lock(service, host):
        if waits(service, host):
            host.disk.remove(host.paths.stopped(service))


def _marker_lock(service: str, host: Host) -> AbstractContextManager[None]:
    """Keep a stop by hand from being overwritten; rollouts hold their lock for too long."""
    return host.disk.locked(host.paths.stop_lock(service), wait=True)


def obstacle(release: Release, host: Host) -> str | None:
    """Return why this release must not start now."""
    if is_stopped(release.service, host):
        return f"service {release.service} was stopped by hand (spark-host start-service)"
    if waits(release.service, host):
        return f"service {release.service} waits for a request"
    rival = _good_rival(release, host)
    return f"{rival} is the last good release" if rival else None


def _good_rival(release: Release, host: Host) -> str | None:
    others = enabled(release.service, host)
    last_good = good(release.service, host).release
    allowed = release.name not in others or last_good not in others or last_good == release.name
    return None if allowed else last_good


def remove_stale_link(release: Release, host: Host) -> None:
    """Disable a candidate that an interrupted rollout enabled next to the good release."""
    if _good_rival(release, host):
        host.units.disable(release.serve_unit)


def active(service: str, host: Host) -> str | None:
    names = host.releases(service)
    units = host.units.show([SERVE.unit(name) for name in names], ["ActiveState"])
    for name in names:
        state = units.get(SERVE.unit(name), {}).get("ActiveState")
        if state in ("active", "activating", "reloading"):
            return name
    return None


def only_active(host: Host) -> str:
    """Return the only running release; ``HostToolError`` for none or several."""
    services = sorted({service_of(name) for name in host.disk.names(host.paths)})
    running = [name for name in (active(service, host) for service in services) if name]
    if len(running) != 1:
        message = f"{len(running)} releases run here: {', '.join(running) or 'none'}"
        raise HostToolError("check", message, "name a release: spark-check RELEASE", 2)
    return running[0]


def stop_service(service: str, by: str, host: Host, for_s: float | None = None) -> int:
    """Stop a service, even across reboots, until a manual start or for ``for_s`` seconds."""
    boots, running = enabled(service, host), active(service, host)
    until = host.clock.now(for_s) if for_s else None
    if until:  # first: a power cut must not leave the service stopped for good
        host.units.enable(RETURN_TIMER.unit(service))
        host.units.begin(RETURN_TIMER.unit(service))
    with _marker_lock(service, host):
        marker = host.disk.read(Stopped, host.paths.stopped(service))
        if marker is None or marker.by is None:
            release = running or next(iter(boots), None) or good(service, host).release
            marker = Stopped(release, marker.at if marker else host.clock.now(), by)
        host.disk.write(host.paths.stopped(service), replace(marker, until=until))
    if marker.until and not until:
        _cancel_return(service, host)
    for name in filter(None, {*boots, running}):
        host.units.stop(SERVE.unit(name), _STOP_S)
    limit = f"until {until}, or until" if until else "until"
    print(f"{service}: stopped {limit} you run: spark-deploy start")
    return 0


def start_when_due(service: str, host: Host) -> int:
    """Start a service whose stop time is over."""
    marker = host.disk.read(Stopped, host.paths.stopped(service))
    if marker is None or marker.until is None:
        _cancel_return(service, host)
    elif marker.until <= host.clock.now():
        return start_service(service, host)
    return 0


def _cancel_return(service: str, host: Host) -> None:
    host.units.disable(RETURN_TIMER.unit(service))
    host.units.stop(RETURN_TIMER.unit(service), _TIMER_S)


def retire_service(service: str, host: Host) -> int:
    """Remove a service; `prune` removes its files later.

    Delete the records first: a release recorded as good starts at boot. Stop the engine last, so an
    interrupted run can be repeated.
    """
    host.disk.remove(host.paths.good(service))
    host.disk.remove(host.paths.stopped(service))
    host.units.disable(GATEWAY.unit(service))
    host.units.stop(GATEWAY.unit(service), _STOP_S)
    _cancel_return(service, host)
    for name in filter(None, {*enabled(service, host), active(service, host)}):
        host.units.disable(SERVE.unit(name))
        host.units.stop(SERVE.unit(name), _STOP_S)
    print(f"{service}: retired")
    return 0


def start_service(service: str, host: Host) -> int:
    marker = host.disk.read(Stopped, host.paths.stopped(service))
    name = good(service, host).release or (marker.release if marker else None)
    host.disk.remove(host.paths.stopped(service))
    if marker and marker.until:
        _cancel_return(service, host)
    if name is None:
        raise HostToolError(service, "no proven release to start", "run the deploy for this host")
    release = host.disk.load(name, host.paths)
    host.units.start(release.serve_unit, release.timeouts.start_s + 900)
    print(f"{service}: {name} is up")
    return 0


def rolled_back(service: str, host: Host) -> RollbackRecord | None:
    record = host.disk.read(RollbackRecord, host.paths.rollback(service))
    current = good(service, host).release
    return record if record and (record.state, record.to) == ("done", current) else None


def note_rollback(service: str, target: str, host: Host) -> None:
    record = RollbackRecord("asked", good(service, host).release, target, host.clock.now())
    host.disk.write(host.paths.rollback(service), record)


def _settle_rollback(release: Release, host: Host) -> None:
    """Complete a rollback if the release is good, or cancel it for another."""
    path = host.paths.rollback(release.service)
    record = host.disk.read(RollbackRecord, path)
    if record is None or record.to != release.name:
        host.disk.remove(path)
    elif record.state == "asked":
        host.disk.write(path, replace(record, state="done"))
