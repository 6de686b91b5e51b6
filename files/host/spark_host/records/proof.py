"""Proofs: what the last check of a release found, bound to one run of its unit."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from spark_contract.records import FullCheck, Proof
from spark_contract.release import Release

from spark_host.records import boot, upgrades
from spark_host.system import docker
from spark_host.system.host import Host
from spark_host.system.programs import ProgramSilent, patient_output_of

LEVELS = ("quick", "full", "deep")


def versions() -> dict[str, str]:
    """Return the versions whose change asks for a new proof; absent parts are ``""``.

    What did not answer is ``upgrades.UNKNOWN``: on an overloaded host that is no change.
    """
    with ThreadPoolExecutor(max_workers=3) as pool:
        asked = {name: pool.submit(_known, ask) for name, ask in _ASKED.items()}
        return {"kernel": os.uname().release, **{k: one.result() for k, one in asked.items()}}


def _known(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except (docker.DaemonSilent, ProgramSilent):
        return upgrades.UNKNOWN


def parts(release: Release) -> dict[str, str]:
    """Return the versions a release brings along: its image, and our plugin in it."""
    return {"image": release.image.base, "plugin": release.image.plugin}


def driver() -> str:
    """Return the version of the driver that is loaded; ``""`` without one."""
    loaded = Path("/proc/driver/nvidia/version")
    if loaded.is_file():
        # "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.159.03  Release Build"
        return _version_in(loaded.read_text().splitlines()[0])
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    asked = patient_output_of("nvidia-smi", *query)
    return asked.splitlines()[0].strip() if asked else ""


_ASKED: dict[str, Callable[[], str]] = {
    "driver": driver,
    "docker": lambda: str((docker.query("/version", 5) or {}).get("Version", "")),
    "toolkit": lambda: _version_in(patient_output_of("nvidia-ctk", "--version") or ""),
}


def _version_in(text: str) -> str:
    match = re.search(r"\b\d+\.\d+(\.\d+)*\S*", text)
    return match[0] if match else ""


def read(release: str, host: Host) -> Proof | None:
    """Return the proof of a release, or ``None``."""
    return host.disk.read(Proof, host.paths.proof(release))


def write(proof: Proof, host: Host) -> None:
    """Keep a proof; a passed quick check does not replace a passed full one of the same run.

    What was seen while the run started is kept as long as its proofs are.
    """
    before = read(proof.release, host)
    full = before.last_full if before else None
    if proof.ok and proof.level != "quick":
        full = FullCheck(proof.invocation_id, proof.checked_at, proof.versions)
    same_run = before is not None and before.invocation_id == proof.invocation_id
    if before and before.ok and proof.ok and proof.level == "quick" and same_run:
        return
    start = before.start_memory if before and same_run else None
    kept = replace(
        proof,
        last_full=full,
        bench=before.bench if before else None,
        start_memory=proof.start_memory or start,
        load_lines=proof.load_lines or (before.load_lines if before and same_run else ()),
        kv_cache=proof.kv_cache or (before.kv_cache if before and same_run else None),
    )
    host.disk.write(host.paths.proof(proof.release), kept)


def withdraw(release: Release, since: str, host: Host) -> None:
    """Take back what a failed trial proved: an engine may die after it passed the quick check."""
    found = read(release.name, host)
    if found and found.ok and found.checked_at >= since:
        host.disk.write(host.paths.proof(release.name), replace(found, ok=False))


def bench_due(release: Release, found: Proof) -> bool:
    """Return whether the speed was never measured under the versions of the last full check."""
    if release.check.bench is None or release.check.bench.limit_s <= 0 or not found.last_full:
        return False
    return not found.bench or bool(
        upgrades.changed(found.bench["versions"], found.last_full.versions)
    )


def bench_before(release: Release, host: Host) -> dict[str, Any] | None:
    """Return the measurement to compare with: of this release, else of the last comparable one.

    Comparable is a proven release of the same service, model and profile.
    """
    for name in (release.name, *boot.good(release.service, host).all):
        other = host.release(name)
        if other and (other.model, other.profile) == (release.model, release.profile):
            found = read(name, host)
            if found and found.bench:
                return dict(found.bench)
    return None


def keep_bench(proof: Proof, bench: dict[str, Any], host: Host) -> None:
    """Keep a measurement with the release's proof."""
    host.disk.write(host.paths.proof(proof.release), replace(proof, bench=bench))


def why_not(
    proof: Proof | None, digest: str, invocation_id: str | None, now: dict[str, str]
) -> str | None:
    """Return why the proof does not cover the present run; ``None`` when it does.

    A quick proof of this run is enough when a full one was passed under the same versions.
    """
    if proof is None:
        return "never checked"
    if proof.digest != digest:
        return "the proof is of another release"
    if not proof.ok:
        return "the last check failed"
    if not invocation_id or proof.invocation_id != invocation_id:
        return "the engine was started after the last check"
    if not proof.last_full:
        return "only the quick check was run"
    changed = upgrades.changed(proof.last_full.versions, now)
    return f"changed since the full check: {', '.join(changed)}" if changed else None
