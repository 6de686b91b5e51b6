"""Everything a controller asks of a host, as one JSON object."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from spark_contract.documents import plain
from spark_contract.paths import Paths
from spark_contract.records import Stopped
from spark_contract.release import Release
from spark_contract.status import (
    GatewayState,
    HostMemory,
    KnownRelease,
    Live,
    RolledBack,
    ServeUnit,
    Service,
    Status,
    Tools,
)
from spark_contract.units import GATEWAY, SWITCH

from spark_host.check import measure
from spark_host.engine import memory
from spark_host.engine.client import Engine, EngineError
from spark_host.gateway import gateway, traffic
from spark_host.jobs import jobs
from spark_host.records import boot, proof, upgrades
from spark_host.rollout import request
from spark_host.rollout.ports import boot_id
from spark_host.system import stored as releases
from spark_host.system import systemd
from spark_host.system.ports import Host
from spark_host.watch import loop

_SERVE_FIELDS = (
    "ActiveState",
    "SubState",
    "InvocationID",
    "NRestarts",
    "Result",
    "MainPID",
    "ActiveEnterTimestamp",
)


def status(paths: Paths, live: bool) -> Status:
    """Return the host's state.

    Args:
        paths: Where to look.
        live: Also ask the running engines one question each.
    """
    host = Host(paths)
    known = [r for n in releases.names(paths) if (r := releases.load_if_present(n, paths))]
    services = sorted({release.service for release in known} | _marked(paths))
    digests = jobs.all_digests(paths)
    gateways = [GATEWAY.of(service) for service in services]
    switched = [release for release in known if paths.switch(release.name).exists()]
    # One question for all units: a call of systemctl each would cost more than all the rest.
    asked = [*(r.serve_unit for r in known), *gateways, *(SWITCH.of(r.name) for r in switched)]
    units = systemd.show(asked, [*_SERVE_FIELDS, "Job"])
    versions = proof.versions()
    return Status(
        tools=Tools(_tools_digest(paths)),
        releases=tuple(_release(release) for release in known),
        serve=tuple(_serve(release, units, host) for release in known),
        services={name: _service(name, known, units, host) for name in services},
        proofs={r.name: _proof(r, units, versions, host) for r in known},
        switch={
            r.name: request.judge(r.name, units.get(SWITCH.of(r.name), {}), host) for r in switched
        },
        jobs=tuple(jobs.poll(digests, paths)) if digests else (),
        memory=_memory(),
        versions=versions,
        versions_unknown=tuple(upgrades.unknown(versions)),
        reboot_pending=upgrades.reboot_pending(),
        live=_live([r for r in known if _is_active(r, units)], paths) if live else None,
        events={name: tuple(loop.events(name, paths)) for name in services},
        boot_id=boot_id(),
    )


def _marked(paths: Paths) -> set[str]:
    folder = paths.state / "stopped"
    return {path.stem for path in folder.glob("*.json")} if folder.is_dir() else set()


def _tools_digest(paths: Paths) -> str | None:
    try:
        return os.readlink(paths.tools / "current").rstrip("/").rpartition("/")[2]
    except OSError:
        return None


def _release(release: Release) -> KnownRelease:
    return KnownRelease(
        name=release.name,
        service=release.service,
        digest=release.digest,
        model=release.model,
        profile=release.profile,
        names=release.names,
        tree=release.tree.path,
        image=release.image.tag,
    )


def _is_active(release: Release, units: dict[str, systemd.UnitState]) -> bool:
    return units.get(release.serve_unit, {}).get("ActiveState") == "active"


def _serve(release: Release, units: dict[str, systemd.UnitState], host: Host) -> ServeUnit:
    unit = units.get(release.serve_unit, {})
    return ServeUnit(
        release=release.name,
        active=unit.get("ActiveState", "inactive"),
        sub=unit.get("SubState", "dead"),
        enabled=release.name in boot.enabled(release.service, host),
        invocation_id=unit.get("InvocationID") or None,
        restarts=int(unit.get("NRestarts") or 0),
        result=unit.get("Result", ""),
        main_pid=int(unit.get("MainPID") or 0),
        since=unit.get("ActiveEnterTimestamp") or None,
    )


def _service(
    name: str, known: list[Release], units: dict[str, systemd.UnitState], host: Host
) -> Service:
    paths, record, back = host.paths, boot.good(name, host), boot.rolled_back(name, host)
    running = [r.name for r in known if r.service == name and _is_active(r, units)]
    return Service(
        good=record.release,
        previous=record.previous,
        enabled=tuple(boot.enabled(name, host)),
        active=running[0] if running else None,
        stopped_by_hand=host.disk.read(Stopped, paths.stopped(name)),
        rolled_back=RolledBack(back.came, back.to, back.at) if back else None,
        door_open=traffic.is_open(name, paths),
        gateway=GatewayState(
            active=units.get(GATEWAY.of(name), {}).get("ActiveState", "inactive"),
            enabled=gateway.boots(name, paths),
            key_problem=gateway.key_problem(name, paths) if running else None,
            difference=gateway.difference(name, paths),
        ),
    )


def _proof(
    release: Release,
    units: dict[str, systemd.UnitState],
    versions: dict[str, str],
    host: Host,
) -> dict[str, Any]:
    found = proof.read(release.name, host)
    invocation = units.get(release.serve_unit, {}).get("InvocationID")
    active = _is_active(release, units)
    why = proof.why_not(found, release.digest, invocation, versions) if active else "not running"
    speed = list(measure.sentences(found.bench)) if found and found.bench else []
    said = plain(found) if found else {}
    return {**said, "current": why is None, "why": why, "speed": speed}


def _memory() -> HostMemory:
    values = memory.meminfo()
    return HostMemory(values["MemTotal"], values["MemAvailable"])


def _live(running: list[Release], paths: Paths) -> Live | None:
    """Ask every running engine; return the first bad answer, else the last good one."""
    found = None
    for release in running:
        found = ask(release, paths)
        if not found.ok:
            break
    return found


def ask(release: Release, paths: Paths, timeout_s: float = 30) -> Live:
    """Return whether one short completion comes through the engine's socket."""
    start = time.monotonic()
    question = release.check.questions[0].prompt if release.check.questions else "Hello"
    body = {
        "model": release.names[0],
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 8,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    try:
        answer = Engine.of(release, paths).chat(body, timeout_s)
        ok = int(answer["usage"]["completion_tokens"]) > 0
        detail = str(answer["choices"][0]["message"].get("content"))
    except (EngineError, KeyError, IndexError, TypeError) as error:
        ok, detail = False, str(error)
    seconds = round(time.monotonic() - start, 3)
    return Live(ok, release.name, seconds, detail)


def main(words: list[str], paths: Paths) -> int:
    """Run ``status [--live]``."""
    json.dump(plain(status(paths, "--live" in words)), sys.stdout)
    print()
    return 0
