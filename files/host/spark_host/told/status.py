"""Everything a controller asks of a host, as one JSON object."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.records import DailyLook, Stopped
from spark_contract.release import Release
from spark_contract.status import (
    GatewayState,
    HostMemory,
    Live,
    ReleaseState,
    Service,
    Status,
    UnderWay,
)
from spark_contract.units import GATEWAY, MAIN_SERVICE, SERVE, SWITCH

from spark_host.check import measure
from spark_host.check.probe import CheckError, Probe
from spark_host.check.questions import pooled
from spark_host.engine import compile_cache, memory
from spark_host.engine.client import Engine
from spark_host.gateway import gateway, traffic
from spark_host.jobs import jobs
from spark_host.records import boot, proof, upgrades
from spark_host.rollout import request
from spark_host.system import members, stored, systemd
from spark_host.system.ports import Host
from spark_host.system.programs import answer
from spark_host.watch import loop

_DETAIL = 300  # an answer is shown, not handed on


def status(paths: Paths, live: bool) -> Status:
    """Return the host's state; ``live`` also asks the running engines one question each."""
    host = Host(paths)
    known = [release for name in stored.names(paths) if (release := host.release(name))]
    services = sorted({release.service for release in known} | _marked(paths))
    # One question for all units: a call of systemctl each would cost more than all the rest.
    asked = [template.of("*") for template in (SERVE, SWITCH, GATEWAY)]
    units = systemd.loaded(asked, ["ActiveState", "InvocationID", "NRestarts", "Job"])
    with ThreadPoolExecutor() as pool:  # the slow ones wait for others: engine, docker, driver
        answering = pool.submit(_live, [r for r in known if live and _is_active(r, units)], paths)
        versioning = pool.submit(proof.versions)
        states = jobs.poll(digests, paths) if (digests := jobs.all_digests(paths)) else []
        versions, answers, free = versioning.result(), answering.result(), memory.meminfo()
    return Status(
        releases=tuple(_release(release, units, versions, host) for release in known),
        services={name: _service(name, known, units, host) for name in services},
        jobs=tuple(states),
        memory=HostMemory(free["MemTotal"], free["MemAvailable"]),
        versions=versions,
        versions_unknown=tuple(upgrades.unknown(versions)),
        reboot_pending=upgrades.reboot_pending(),
        live=answers[0] if answers else None,
        more_live=tuple(answers[1:]),
        events={name: loop.events(name, paths) for name in services},
        daily=host.disk.read(DailyLook, paths.daily),
    )


def _marked(paths: Paths) -> set[str]:
    folder = paths.state / "stopped"
    return {path.stem for path in folder.glob("*.json")} if folder.is_dir() else set()


def _is_active(release: Release, units: dict[str, systemd.UnitState]) -> bool:
    return units.get(release.serve_unit, {}).get("ActiveState") == "active"


def _release(
    release: Release,
    units: dict[str, systemd.UnitState],
    versions: dict[str, str],
    host: Host,
) -> ReleaseState:
    unit, found = units.get(release.serve_unit, {}), proof.read(release.name, host)
    why: str | None = "not running"
    if _is_active(release, units):
        why = proof.why_not(found, release.digest, unit.get("InvocationID"), versions)
    return ReleaseState(
        name=release.name,
        model=release.model,
        profile=release.profile,
        names=release.names,
        active=unit.get("ActiveState", "inactive"),
        restarts=int(unit.get("NRestarts") or 0),
        proof=found,
        unproven=why,
        speed=tuple(measure.sentences(found.bench)) if found and found.bench else (),
        cache=_cache(release, versions, host),
        change_failed=units.get(SWITCH.of(release.name), {}).get("ActiveState") == "failed",
    )


def _cache(release: Release, versions: dict[str, str], host: Host) -> str | None:
    """Return the folder of compile caches in which a candidate would find one to copy."""
    whole = compile_cache.is_whole(release, versions.get("driver", ""), host)
    proven = release.name in boot.good(release.service, host).all
    return str(Path(release.cache).parent) if release.cache and whole and proven else None


def _service(
    name: str, known: list[Release], units: dict[str, systemd.UnitState], host: Host
) -> Service:
    paths = host.paths
    running = [r.name for r in known if r.service == name and _is_active(r, units)]
    serving = host.release(running[0] if running else boot.good(name, host).release)
    return Service(
        good=boot.good(name, host).release,
        enabled=tuple(boot.enabled(name, host)),
        active=running[0] if running else None,
        stopped_by_hand=host.disk.read(Stopped, paths.stopped(name)),
        rolled_back=boot.rolled_back(name, host),
        traffic_open=traffic.is_open(name, paths),
        gateway=GatewayState(
            active=units.get(GATEWAY.of(name), {}).get("ActiveState", "inactive"),
            enabled=gateway.boots(name, paths),
            key_problem=gateway.key_problem(name, paths) if running else None,
            difference=gateway.difference(name, paths),
        ),
        head=_head(serving, paths) if serving else None,
        rollout=_rollout([r.name for r in known if r.service == name], units, host),
    )


def _rollout(names: list[str], units: dict[str, systemd.UnitState], host: Host) -> UnderWay | None:
    """Return the change that is carried out; one that still waits for its turn only without it."""
    asked = (request.under_way(name, units.get(SWITCH.of(name), {}), host) for name in names)
    found = [one for one in asked if one]
    return next((one for one in found if one.phase), found[0] if found else None)


def _head(release: Release, paths: Paths) -> str | None:
    """Return who answers for a release, where this host only computes for it."""
    try:
        worker = members.is_worker(release, paths)
    except HostToolError:  # it lost its address: its engine says so when it starts
        return None
    return release.cluster.head.host if release.cluster and worker else None


def _live(running: list[Release], paths: Paths) -> list[Live]:
    """Ask every running engine, the main one first."""
    ordered = sorted(running, key=lambda release: release.service != MAIN_SERVICE)
    return [ask(release, paths) for release in ordered]


def ask(release: Release, paths: Paths, timeout_s: float = 30) -> Live:
    """Return whether one short answer of the model's kind comes through the engine's socket."""
    start = time.monotonic()
    if members.is_worker(release, paths):
        away = ", ".join(one.host for one in members.missing(release, paths))
        detail = f"{away} is not joined" if away else "joined with its head, which answers"
        return Live(not away, release.name, 0.0, detail)
    probe = Probe(release, Engine.of(release, paths), list, until_s=start + timeout_s)
    try:
        detail = _answer(probe)
    except CheckError as error:
        detail = str(error)
    ok = probe.tokens_seen > 0
    return Live(ok, release.name, round(time.monotonic() - start, 3), detail[:_DETAIL])


def _answer(probe: Probe) -> str:
    if probe.plan.task in pooled.ASKED:
        return pooled.ASKED[probe.plan.task](probe)
    questions = probe.plan.questions
    return probe.say(questions[0].prompt if questions else "Hello", 8)


def main(words: list[str], paths: Paths) -> int:
    """Run ``status [--live]``."""
    answer(status(paths, "--live" in words))
    return 0
