"""Decides which release may run, from enabled units, known-good releases, stop markers and proofs.

A proof is the result of a release's last check, and is valid for one run of the unit.
"""

import os
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from spark_contract.records import FullCheck, KnownGoodReleases, Proof, RollbackRecord, Stopped
from spark_contract.release import Release, parse_service
from spark_contract.tool import HostToolError
from spark_contract.units import GATEWAY, SCHEDULED_START_TIMER, SERVE

from spark_host.records.versions import describe_changes
from spark_host.system.host import Host

LEVELS = ("quick", "full", "deep")  # of a check
_MAX_PREVIOUS = 10
_STOP_TIMEOUT_S = 900.0
_TIMER_TIMEOUT_S = 60.0
_EXTRA_START_TIMEOUT_S = 900.0


def enabled_releases(service: str, host: Host) -> list[str]:
    releases = []
    for link in host.disk.list_folder(host.paths.boot_links):
        name = SERVE.instance(link)
        try:
            if link == SERVE.unit(name) and parse_service(name) == service:
                releases.append(name)
        except HostToolError:
            continue
    return releases


def read_known_good(service: str, host: Host) -> KnownGoodReleases:
    return host.disk.read(KnownGoodReleases, host.paths.known_good(service)) or KnownGoodReleases()


def record_known_good(release: Release, host: Host) -> None:
    """Record a proven release as known-good; keep earlier releases as rollback targets."""
    before = read_known_good(release.service, host)
    earlier = tuple(name for name in dict.fromkeys(before.names) if name != release.name)
    record = KnownGoodReleases(release.name, earlier[:_MAX_PREVIOUS], host.clock.now())
    if release.cache:  # nobody else writes the engine's files to disk
        os.sync()
    try:
        host.disk.write(host.paths.known_good(release.service), record)
    except OSError:  # a full disk is harmless if the record already names this release
        if before.release != release.name:
            raise
    _finish_rollback_record(release, host)


def withdraw_known_good(release: Release, host: Host) -> None:
    """If this is the last known-good release, make the previous one the last again."""
    record = read_known_good(release.service, host)
    if record.release == release.name:
        before, *previous = record.previous or (None,)
        others = set(enabled_releases(release.service, host)) - {release.name}
        # If no enabled release were known-good, all of them could start.
        if others and before not in others:
            return
        record = replace(record, release=before, previous=tuple(previous))
        host.disk.write(host.paths.known_good(release.service), record)


def enable_only(release: Release, host: Host) -> None:
    """Make only this release start at boot.

    A power cut can leave two releases enabled; then only the known-good release may start (see
    :func:`reason_not_to_start`).
    """
    others = enabled_releases(release.service, host)
    if others and read_known_good(release.service, host).release not in others:
        # If two releases are enabled, one of them must be known-good.
        record_known_good(release, host)
    host.units.enable(release.serve_unit)
    record_known_good(release, host)
    for name in enabled_releases(release.service, host):
        if name != release.name:
            host.units.disable(SERVE.unit(name))


def opens_at_start(release: Release, host: Host) -> bool:
    """Return whether the gateway opens after the quick check; a rollout opens candidates later."""
    return release.name in enabled_releases(release.service, host)


def is_stopped(service: str, host: Host) -> bool:
    return host.disk.exists(host.paths.stopped(service)) and not waits_for_request(service, host)


def waits_for_request(service: str, host: Host) -> bool:
    marker = host.disk.read(Stopped, host.paths.stopped(service))
    return marker is not None and marker.on_request


def stop_until_request(release: Release, host: Host) -> None:
    """Stop a service; first write the marker, so that a reboot does not start the service."""
    with _marker_lock(release.service, host):
        if not is_stopped(release.service, host):
            marker = Stopped(release.name, host.clock.now(), on_request=True)
            host.disk.write(host.paths.stopped(release.service), marker)
    host.units.stop(release.serve_unit, _STOP_TIMEOUT_S)


def allow_start(service: str, host: Host) -> None:
    """Remove the marker of a service that is waiting for a request."""
    with _marker_lock(service, host):
        if waits_for_request(service, host):
            host.disk.remove(host.paths.stopped(service))


def _marker_lock(service: str, host: Host) -> AbstractContextManager[None]:
    """Lock the stop marker, because a rollout keeps the service lock for too long."""
    return host.disk.locked(host.paths.stop_lock(service), wait=True)


def reason_not_to_start(release: Release, host: Host) -> str | None:
    if is_stopped(release.service, host):
        command = f"spark-host start-service {release.service}"
        return f"service {release.service} was stopped on purpose; run `{command}`"
    if waits_for_request(release.service, host):
        return f"service {release.service} is waiting for a request"
    good = _other_known_good(release, host)
    return f"the last known-good release is {good}" if good else None


def _other_known_good(release: Release, host: Host) -> str | None:
    """Return the last known-good release if it differs from ``release`` and both are enabled."""
    enabled = enabled_releases(release.service, host)
    good = read_known_good(release.service, host).release
    both_enabled = release.name in enabled and good in enabled
    return good if both_enabled and good != release.name else None


def remove_stale_link(release: Release, host: Host) -> None:
    """Disable a candidate that an interrupted rollout enabled next to the known-good release."""
    if _other_known_good(release, host):
        host.units.disable(release.serve_unit)


def active_release(service: str, host: Host) -> str | None:
    names = host.releases(service)
    units = host.units.show([SERVE.unit(name) for name in names], ["ActiveState"])
    for name in names:
        state = units.get(SERVE.unit(name), {}).get("ActiveState")
        if state in ("active", "activating", "reloading"):
            return name
    return None


def only_active_release(host: Host) -> str:
    """Return the only running release; raise HostToolError if there is none or more than one."""
    services = sorted({parse_service(name) for name in host.disk.release_names(host.paths)})
    running = [name for name in (active_release(service, host) for service in services) if name]
    if len(running) != 1:
        message = f"expected one running release, found {', '.join(running) or 'none'}"
        raise HostToolError("check", message, "run `spark-check RELEASE`", 2)
    return running[0]


def stop_service(service: str, by: str, host: Host, for_s: float | None = None) -> int:
    """Stop a service for ``for_s`` seconds, or else until a manual start, even across reboots."""
    enabled, running = enabled_releases(service, host), active_release(service, host)
    until = host.clock.now(for_s) if for_s else None
    with _marker_lock(service, host):
        if until:  # before the stop, so that a power cut cannot leave the service stopped
            host.units.enable(SCHEDULED_START_TIMER.unit(service))
            host.units.start_in_background(SCHEDULED_START_TIMER.unit(service))
        marker = host.disk.read(Stopped, host.paths.stopped(service))
        if marker is None or marker.by is None:
            release = running or next(iter(enabled), None) or read_known_good(service, host).release
            marker = Stopped(release, marker.at if marker else host.clock.now(), by)
        host.disk.write(host.paths.stopped(service), replace(marker, until=until))
    if marker.until and not until:
        _cancel_scheduled_start(service, host)
    # A rollout may have started another release before the marker was written.
    for name in filter(None, {*enabled, running, active_release(service, host)}):
        host.units.stop(SERVE.unit(name), _STOP_TIMEOUT_S)
    until_text = f" until {until}" if until else ""
    print(f"{service}: stopped{until_text}; run `spark-deploy start` to start it")
    return 0


def start_when_due(service: str, host: Host) -> int:
    """Start the service if the timed stop is over."""
    with _marker_lock(service, host):
        marker = host.disk.read(Stopped, host.paths.stopped(service))
        if marker is None or marker.until is None:
            _cancel_scheduled_start(service, host)
            return 0
    return start_service(service, host) if marker.until <= host.clock.now() else 0


def _cancel_scheduled_start(service: str, host: Host) -> None:
    host.units.disable(SCHEDULED_START_TIMER.unit(service))
    host.units.stop(SCHEDULED_START_TIMER.unit(service), _TIMER_TIMEOUT_S)


def retire_service(service: str, host: Host) -> int:
    """Remove a service; `prune` removes the files later.

    The records are deleted first, because a known-good release starts at boot. The engine stops
    last, so that an interrupted run can be repeated.
    """
    host.disk.remove(host.paths.known_good(service))
    host.disk.remove(host.paths.stopped(service))
    host.units.disable(GATEWAY.unit(service))
    host.units.stop(GATEWAY.unit(service), _STOP_TIMEOUT_S)
    _cancel_scheduled_start(service, host)
    for name in filter(None, {*enabled_releases(service, host), active_release(service, host)}):
        host.units.disable(SERVE.unit(name))
        host.units.stop(SERVE.unit(name), _STOP_TIMEOUT_S)
    print(f"{service}: retired")
    return 0


def start_service(service: str, host: Host) -> int:
    """Start the last known-good release and remove the stop marker."""
    marker = host.disk.read(Stopped, host.paths.stopped(service))
    name = read_known_good(service, host).release or (marker.release if marker else None)
    host.disk.remove(host.paths.stopped(service))
    if marker and marker.until:
        _cancel_scheduled_start(service, host)
    if name is None:
        raise HostToolError(service, "has no proven release", "run the deploy for this host")
    release = host.disk.load_release(name, host.paths)
    host.units.start(release.serve_unit, release.timeouts.start_s + _EXTRA_START_TIMEOUT_S)
    print(f"{service}: {name} is up")
    return 0


def last_rollback(service: str, host: Host) -> RollbackRecord | None:
    record = host.disk.read(RollbackRecord, host.paths.rollback(service))
    current = read_known_good(service, host).release
    is_current = record and record.state == "done" and record.to == current
    return record if is_current else None


def record_rollback(service: str, target: str, host: Host) -> None:
    current = read_known_good(service, host).release
    record = RollbackRecord("asked", current, target, host.clock.now())
    host.disk.write(host.paths.rollback(service), record)


def _finish_rollback_record(release: Release, host: Host) -> None:
    """Mark a rollback to this release as done; remove the record of any other rollback."""
    path = host.paths.rollback(release.service)
    record = host.disk.read(RollbackRecord, path)
    if record is None or record.to != release.name:
        host.disk.remove(path)
    elif record.state == "asked":
        host.disk.write(path, replace(record, state="done"))


def read_proof(release: str, host: Host) -> Proof | None:
    return host.disk.read(Proof, host.paths.proof(release))


def write_proof(proof: Proof, host: Host) -> None:
    """Write a proof; a passed quick check does not replace a passed check of the same run."""
    before = read_proof(proof.release, host)
    last_full = before.last_full if before else None
    if proof.ok and proof.level != "quick":
        last_full = FullCheck(proof.invocation_id, proof.checked_at, proof.versions)
    is_same_run = before and before.invocation_id == proof.invocation_id
    earlier = before if is_same_run else None  # proof of the same run
    if earlier and earlier.ok and proof.ok and proof.level == "quick":
        return
    inherited = {
        name: getattr(earlier, name)
        for name in ("start_memory", "start_times_s", "load_lines", "kv_cache")
        if earlier and not getattr(proof, name)
    }
    bench = before.bench if before else None
    result = replace(proof, last_full=last_full, bench=bench, **inherited)
    host.disk.write(host.paths.proof(proof.release), result)


def invalidate_proof(release: Release, host: Host) -> None:
    proof = read_proof(release.name, host)
    if proof and proof.ok:
        host.disk.write(host.paths.proof(release.name), replace(proof, ok=False))


def is_bench_due(release: Release, proof: Proof) -> bool:
    """Return whether the speed must be measured: never done, or versions have changed since."""
    if release.check.bench is None or release.check.bench.limit_s <= 0 or not proof.last_full:
        return False
    versions = proof.last_full.versions
    return not proof.bench or bool(describe_changes(proof.bench["versions"], versions))


def read_earlier_bench(release: Release, host: Host) -> dict[str, Any] | None:
    """Return the last measurement of this service with the same model and profile."""
    for name in (release.name, *read_known_good(release.service, host).names):
        other = host.release(name)
        if other and (other.model, other.profile) == (release.model, release.profile):
            proof = read_proof(name, host)
            if proof and proof.bench:
                return dict(proof.bench)
    return None


def unproven_reason(
    proof: Proof | None, digest: str, invocation_id: str | None, current_versions: dict[str, str]
) -> str | None:
    """Return why the proof is not valid for the current run, or None.

    A quick check suffices if a full check passed under the same versions.
    """
    if proof is None:
        return "never checked"
    if proof.digest != digest:
        return "the proof belongs to another release"
    if not proof.ok:
        return "the last check failed"
    if not invocation_id or proof.invocation_id != invocation_id:
        return "the engine has been restarted since the last check"
    if not proof.last_full:
        return "only the quick check has run"
    differences = describe_changes(proof.last_full.versions, current_versions)
    return f"changed since the full check: {', '.join(differences)}" if differences else None
