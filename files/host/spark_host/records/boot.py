"""Which release may run: the boot pointer (enabled unit), the good record, the stop marker."""

from __future__ import annotations

from dataclasses import replace

from spark_contract.errors import HostToolError
from spark_contract.records import Good, Stopped, WayBack
from spark_contract.release import Release, service_of
from spark_contract.units import GATEWAY, RETURN_TIMER, SERVE

from spark_host.system.host import Host

_KEPT = 10
_STOP_S = 900.0
_TIMER_S = 60.0


def enabled(service: str, host: Host) -> list[str]:
    """Return the releases of a service that systemd starts at boot."""
    found = []
    for link in host.disk.listed(host.paths.boot_links):
        name = SERVE.instance(link)
        try:
            if link == SERVE.of(name) and service_of(name) == service:
                found.append(name)
        except HostToolError:
            continue
    return found


def good(service: str, host: Host) -> Good:
    """Return the record of proven releases."""
    return host.disk.read(Good, host.paths.good(service)) or Good()


def record_good(release: Release, host: Host) -> None:
    """Record the release as the last good one, the one before it as the way back."""
    before = good(release.service, host)
    kept = tuple(name for name in dict.fromkeys(before.all) if name != release.name)[:_KEPT]
    try:
        host.disk.write(
            host.paths.good(release.service), Good(release.name, kept, host.clock.now())
        )
    except OSError:
        # A full disk does not keep a host from what it boots anyway.
        if before.release != release.name:
            raise
    _settle_rollback(release, host)


def withdraw_good(release: Release, host: Host) -> None:
    """Take back a good record that a failed trial wrote: what does not serve is not started again.

    No time is compared: clocks step back.
    """
    found = good(release.service, host)
    if found.release == release.name:
        before, *previous = found.previous or (None,)
        record = replace(found, release=before, previous=tuple(previous))
        host.disk.write(host.paths.good(release.service), record)


def enable_only(release: Release, host: Host) -> None:
    """Make the release the one that boots.

    The order is what makes a power cut harmless: the new link first, then the good record, then
    the old link away. With both links there, :func:`obstacle` lets only the good one start.
    """
    rivals = enabled(release.service, host)
    if rivals and good(release.service, host).release not in rivals:
        record_good(release, host)  # two links need one that is good between them
    host.units.enable(release.serve_unit)
    record_good(release, host)
    for name in enabled(release.service, host):
        if name != release.name:
            host.units.disable(SERVE.of(name))


def opens_at_start(release: Release, host: Host) -> bool:
    """Return whether requests may pass once a start of this release has passed its quick check.

    A candidate on trial is not enabled; the gateway opens to it only after the full check.
    """
    return release.name in enabled(release.service, host)


def is_stopped(service: str, host: Host) -> bool:
    """Return whether someone stopped the service on purpose."""
    return host.disk.exists(host.paths.stopped(service))


def obstacle(release: Release, host: Host) -> str | None:
    """Return why the unit of this release must not start now, or ``None``."""
    if is_stopped(release.service, host):
        return f"service {release.service} was stopped by hand (spark-host start-service)"
    rival = _good_rival(release, host)
    return f"{rival} is the last good release" if rival else None


def _good_rival(release: Release, host: Host) -> str | None:
    rivals = enabled(release.service, host)
    chosen = good(release.service, host).release
    mine = release.name not in rivals or chosen not in rivals or chosen == release.name
    return None if mine else chosen


def drop_left_link(release: Release, host: Host) -> None:
    """Have only the good release boot, where a change cut off has left the candidate's link too.

    With that link the candidate could not be started, or clients would reach it untried.
    """
    if _good_rival(release, host):
        host.units.disable(release.serve_unit)


def active(service: str, host: Host) -> str | None:
    """Return the release of a service whose unit is up or coming up, if any."""
    mine = host.releases(service)
    units = host.units.show([SERVE.of(name) for name in mine], ["ActiveState"])
    for name in mine:
        state = units.get(SERVE.of(name), {}).get("ActiveState")
        if state in ("active", "activating", "reloading"):
            return name
    return None


def only_active(host: Host) -> str:
    """Return the one release that runs on this host.

    Raises:
        HostToolError: There is none, or more than one.
    """
    services = sorted({service_of(name) for name in host.disk.names(host.paths)})
    running = [name for name in (active(service, host) for service in services) if name]
    if len(running) != 1:
        raise HostToolError(
            "check",
            f"{len(running)} releases run here: {', '.join(running) or 'none'}",
            "name one: spark-check RELEASE",
            2,
        )
    return running[0]


def stop_service(service: str, by: str, host: Host, for_s: float | None = None) -> int:
    """Stop a service: it stays down over reboots until someone starts it again, or for a while."""
    running = active(service, host)
    boots = enabled(service, host)
    marker = host.disk.read(Stopped, host.paths.stopped(service))
    if marker is None or marker.by is None:
        release = running or next(iter(boots), None) or good(service, host).release
        marker = Stopped(release, marker.at if marker else host.clock.now(), by)
    until = host.clock.now(for_s) if for_s else None
    if until:  # first, or a cut would leave it down for good
        host.units.enable(RETURN_TIMER.of(service))
        host.units.begin(RETURN_TIMER.of(service))
    # The marker alone keeps it down: whatever is interrupted below, no boot starts it.
    host.disk.write(host.paths.stopped(service), replace(marker, until=until))
    if marker.until and not until:
        _forget_return(service, host)
    for name in {*boots, *([running] if running else [])}:
        host.units.stop(SERVE.of(name), _STOP_S)
    how_long = f"until {until}, or until" if until else "until"
    print(f"{service}: stopped; it stays down {how_long} someone starts it: spark-deploy start")
    return 0


def start_when_due(service: str, host: Host) -> int:
    """Start a service that was stopped for a while, once the while is over; asked every minute."""
    marker = host.disk.read(Stopped, host.paths.stopped(service))
    if marker is None or marker.until is None:
        _forget_return(service, host)
    elif marker.until <= host.clock.now():
        return start_service(service, host)
    return 0


def _forget_return(service: str, host: Host) -> None:
    host.units.disable(RETURN_TIMER.of(service))
    host.units.stop(RETURN_TIMER.of(service), _TIMER_S)


def retire_service(service: str, host: Host) -> int:
    """End a service that nobody wants any more; what was made for it stays, for `prune` to take.

    Its engine goes last: until then a run that was cut off is seen as unfinished. Its records go
    first, for something good has to boot.
    """
    host.disk.remove(host.paths.good(service))
    host.disk.remove(host.paths.stopped(service))
    host.units.disable(GATEWAY.of(service))
    host.units.stop(GATEWAY.of(service), _STOP_S)
    _forget_return(service, host)
    running = active(service, host)
    for name in {*enabled(service, host), *([running] if running else [])}:
        host.units.disable(SERVE.of(name))
        host.units.stop(SERVE.of(name), _STOP_S)
    print(f"{service}: retired")
    return 0


def start_service(service: str, host: Host) -> int:
    """Take back a stop by hand and start the last good release."""
    marker = host.disk.read(Stopped, host.paths.stopped(service))
    chosen = good(service, host).release or (marker.release if marker else None)
    host.disk.remove(host.paths.stopped(service))
    if marker and marker.until:
        _forget_return(service, host)
    if chosen is None:
        raise HostToolError(service, "no proven release to start", "run the deploy for this host")
    release = host.disk.load(chosen, host.paths)
    host.units.start(release.serve_unit, release.timeouts.start_s + 900)
    print(f"{service}: {chosen} is up")
    return 0


def rolled_back(service: str, host: Host) -> WayBack | None:
    """Return the rollback that brought the current release, if one did."""
    found = host.disk.read(WayBack, host.paths.rollback(service))
    current = good(service, host).release
    return found if found and (found.state, found.to) == ("done", current) else None


def note_rollback(service: str, target: str, host: Host) -> None:
    """Remember that the change about to begin is a way back."""
    note = WayBack("asked", good(service, host).release, target, host.clock.now())
    host.disk.write(host.paths.rollback(service), note)


def _settle_rollback(release: Release, host: Host) -> None:
    """A way back is gone once its release is good; any other good release ends the matter."""
    path = host.paths.rollback(release.service)
    found = host.disk.read(WayBack, path)
    if found and found.to == release.name:
        if found.state == "asked":
            host.disk.write(path, replace(found, state="done"))
    else:
        host.disk.remove(path)
