"""``spark-host status``: the state of the host as a JSON object."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from spark_contract.paths import Paths
from spark_contract.records import DailyReport, Stopped
from spark_contract.release import Release
from spark_contract.status import (
    GatewayState,
    HostMemory,
    LiveCheck,
    ReleaseState,
    RunningRollout,
    Service,
    Status,
)
from spark_contract.tool import HostToolError
from spark_contract.units import (
    GATEWAY,
    MAIN_SERVICE,
    SERVE,
    SWITCH,
    find_unit_overrides,
    list_unit_files_command,
)

from spark_host import jobs
from spark_host.check import checks, speed
from spark_host.check.probe import CheckError, Probe
from spark_host.engine import compile_cache, memory
from spark_host.engine.client import Engine
from spark_host.gateway import gateway, keys, traffic
from spark_host.records import boot, proof, versions
from spark_host.rollout import record
from spark_host.system import cluster, systemd
from spark_host.system.host import Host, release_names
from spark_host.system.programs import read_output_patiently
from spark_host.watch import watchdog

_DETAIL_LENGTH = 300
_Units = dict[str, systemd.UnitState]


def main(args: list[str], paths: Paths) -> Status:
    """Return the host's state; with ``--live``, also send a request to each running engine."""
    host = Host(paths)
    releases = [release for name in release_names(paths) if (release := host.release(name))]
    stopped_marks = (paths.state / "stopped").glob("*.json")
    services = sorted({release.service for release in releases} | {m.stem for m in stopped_marks})
    # One call for all units, because every call is slow.
    patterns = [template.unit("*") for template in (SERVE, SWITCH, GATEWAY)]
    units = systemd.show_loaded(patterns, ["ActiveState", "InvocationID", "NRestarts", "Job"])
    with ThreadPoolExecutor() as pool:  # engine, docker and driver may be slow
        running = [
            release for release in releases if "--live" in args and _is_active(release, units)
        ]
        running.sort(key=lambda release: release.service != MAIN_SERVICE)
        live_checks = pool.submit(lambda: [check_live(release, paths) for release in running])
        reading = pool.submit(versions.read)
        digests = jobs.all_digests(paths)
        job_states = jobs.poll(digests, paths) if digests else []
        installed, live, meminfo = reading.result(), live_checks.result(), memory.meminfo()
    return Status(
        releases=tuple(_release_state(release, units, installed, host) for release in releases),
        services={name: _service_state(name, releases, units, host) for name in services},
        jobs=tuple(job_states),
        memory=HostMemory(meminfo["MemTotal"], meminfo["MemAvailable"]),
        versions=installed,
        versions_unknown=tuple(n for n in installed if installed[n] == versions.UNKNOWN),
        reboot_pending=versions.reboot_pending(),
        live=live[0] if live else None,
        more_live=tuple(live[1:]),
        events={name: watchdog.read_events(name, paths) for name in services},
        daily=host.disk.read(DailyReport, paths.daily),
        unit_overrides=unit_overrides(paths),
    )


def unit_overrides(paths: Paths) -> tuple[str, ...]:
    root = str(paths.root).rstrip("/")
    lines = read_output_patiently("sh", "-c", list_unit_files_command(root)) or ""
    return find_unit_overrides(lines.splitlines(), root)


def _active_state(unit: str, units: _Units) -> str:
    return units.get(unit, {}).get("ActiveState", "inactive")


def _is_active(release: Release, units: _Units) -> bool:
    return _active_state(release.serve_unit, units) == "active"


def _release_state(
    release: Release, units: _Units, installed: dict[str, str], host: Host
) -> ReleaseState:
    unit, last = units.get(release.serve_unit, {}), proof.read(release.name, host)
    unproven: str | None = "not running"
    if _is_active(release, units):
        unproven = proof.unproven_reason(last, release.digest, unit.get("InvocationID"), installed)
    proven = release.name in boot.read_known_good(release.service, host).names
    can_share_cache = proven and compile_cache.is_complete(
        release, installed.get("driver", ""), host
    )
    return ReleaseState(
        name=release.name,
        model=release.model,
        profile=release.profile,
        names=release.names,
        active=_active_state(release.serve_unit, units),
        restarts=int(unit.get("NRestarts") or 0),
        proof=last,
        unproven=unproven,
        speed=tuple(speed.describe(last.bench)) if last and last.bench else (),
        cache=str(Path(release.cache).parent) if release.cache and can_share_cache else None,
        change_failed=_active_state(SWITCH.unit(release.name), units) == "failed",
    )


def _service_state(name: str, all_releases: list[Release], units: _Units, host: Host) -> Service:
    paths, good = host.paths, boot.read_known_good(name, host).release
    releases = [release for release in all_releases if release.service == name]
    active = next((release.name for release in releases if _is_active(release, units)), None)
    serving = host.release(active or good)
    return Service(
        known_good=good,
        enabled=tuple(boot.enabled_releases(name, host)),
        active=active,
        stopped_by_hand=host.disk.read(Stopped, paths.stopped(name)),
        rolled_back=boot.last_rollback(name, host),
        traffic_open=traffic.is_open(name, paths),
        gateway=GatewayState(
            active=_active_state(GATEWAY.unit(name), units),
            enabled=gateway.starts_at_boot(name, paths),
            key_problem=gateway.key_problem(name, paths) if active else None,
            difference=gateway.find_difference(name, paths),
            usage=keys.read_usage(name, paths).keys or None,
        ),
        head=_head_host(serving, paths) if serving else None,
        rollout=_running_rollout([release.name for release in releases], units, host),
    )


def _running_rollout(names: list[str], units: _Units, host: Host) -> RunningRollout | None:
    changes = (
        record.running_rollout(name, units.get(SWITCH.unit(name), {}), host) for name in names
    )
    pending = [change for change in changes if change]
    return next((change for change in pending if change.phase), pending[0] if pending else None)


def _head_host(release: Release, paths: Paths) -> str | None:
    with suppress(HostToolError):
        if release.cluster and cluster.is_worker(release, paths):
            return release.cluster.head.host
    return None


def check_live(release: Release, paths: Paths, timeout_s: float = 30) -> LiveCheck:
    """Send a short request to the engine; on a worker, check that all members have joined."""
    start = time.monotonic()
    if cluster.is_worker(release, paths):
        missing = cluster.describe_missing(release, paths)
        detail = (
            f"{missing} has not joined" if missing else "joined; only the head answers requests"
        )
        return LiveCheck(not missing, release.name, 0.0, detail)
    probe = Probe(release, Engine.for_release(release, paths), list, deadline_s=start + timeout_s)
    try:
        if probe.plan.task in checks.POOLING_CHECKS:
            detail = checks.POOLING_CHECKS[probe.plan.task](probe)
        else:
            questions = probe.plan.questions
            detail = probe.ask(questions[0].prompt if questions else "Hello", 8)
    except CheckError as error:
        detail = str(error)
    seconds = round(time.monotonic() - start, 3)
    return LiveCheck(probe.tokens_seen > 0, release.name, seconds, detail[:_DETAIL_LENGTH])
