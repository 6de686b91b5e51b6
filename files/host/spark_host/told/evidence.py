"""What a host shows of its engines, for a report that may be sent to others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from spark_contract.paths import Paths
from spark_contract.records import Rollout
from spark_contract.release import Release
from spark_contract.status import EngineEvidence, Evidence

from spark_host.check.runner import read_log
from spark_host.engine import kernel_log, start_log
from spark_host.engine.client import Engine, EngineError
from spark_host.engine.container import libraries
from spark_host.records import boot
from spark_host.system import docker, programs, stored
from spark_host.system.ports import Host
from spark_host.system.programs import answer
from spark_host.watch import sensors

_DMI = ("sys_vendor", "product_name", "bios_vendor", "bios_version", "bios_date")
_PLAIN = re.compile(r"[\w .,+/()-]{1,80}")
_VERSION = re.compile(r"[\w.+-]{1,40}")


def evidence(host: Host) -> Evidence:
    """Return everything, of every engine that runs."""
    known = filter(None, map(host.release, stored.names(host.paths)))
    running = [boot.active(service, host) for service in sorted({one.service for one in known})]
    reading = sensors.read()
    gpu = {"celsius": reading.celsius, "power_w": reading.power_w} if reading else {}
    return Evidence(
        firmware=firmware(host.paths.root),
        gpu={name: value for name, value in gpu.items() if value is not None},
        gpu_container=() if docker.gpu_problem(host.paths) else docker.gpu_arguments(host.paths),
        kernel_log=kernel_log.count_troubles(),
        engines=tuple(_engine(one, host) for one in filter(None, map(host.release, running))),
    )


def _engine(release: Release, host: Host) -> EngineEvidence:
    run = host.units.invocation(release.serve_unit) or ""
    said = list(start_log.messages(read_log(release, run)))
    found = docker.container(release.container, 5) or {}
    rollout = host.disk.read(Rollout, host.paths.rollout(release.name))
    return EngineEvidence(
        release=release.name,
        lines=start_log.kernel_lines(said),
        times_s=start_log.times_s(said),
        sizes_bytes=start_log.sizes_bytes(said),
        kv_cache_tokens=start_log.kv_cache_tokens(said),
        libraries=libraries.of_container(str(found["Id"])) if found.get("Id") else {},
        rollout_state=rollout.state if rollout else None,
        rollout_times_s=dict(rollout.times_s) if rollout else {},
        **_counted(release, host.paths),
    )


def _counted(release: Release, paths: Paths) -> dict[str, Any]:
    try:
        metrics = Engine.of(release, paths).metrics()
    except EngineError:
        return {}
    totals = {
        "drafted_tokens": metrics.drafted,
        "accepted_tokens": metrics.accepted,
        "generated_tokens": metrics.total(metrics.dialect.generated),
    }
    return {key: None if value is None else int(value) for key, value in totals.items()}


def firmware(root: Path = Path("/")) -> dict[str, str]:
    """Return product and versions; serial numbers and identifiers stand in other files."""
    found = {}
    for name in _DMI:
        path = root / "sys/class/dmi/id" / name
        text = path.read_text(errors="replace").strip() if path.is_file() else ""
        if _PLAIN.fullmatch(text):
            found[name] = text
    return {**found, **_capsules(programs.output_of("fwupdmgr", "get-devices", "--json") or "")}


def _capsules(text: str) -> dict[str, str]:
    """Return the versions of what fwupd updates through UEFI; of other devices nothing."""
    try:
        devices = json.loads(text).get("Devices", ())
    except (ValueError, AttributeError):
        return {}
    pairs = (
        (str(one.get("Name", "")), str(one.get("Version", "")))
        for one in devices
        if isinstance(one, dict) and one.get("Plugin") == "uefi_capsule"
    )
    return {
        name: version
        for name, version in pairs
        if _PLAIN.fullmatch(name) and _VERSION.fullmatch(version)
    }


def main(words: list[str], paths: Paths) -> int:
    """Run ``evidence``."""
    answer(evidence(Host(paths)))
    return 0
