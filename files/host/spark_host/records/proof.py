"""Proofs: what the last check of a release found, bound to one run of its unit."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spark_contract import files
from spark_contract.paths import Paths
from spark_contract.release import Release, load_if_present

from spark_host.records import boot, upgrades
from spark_host.system import docker
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
    return {"image": release.image_base, "plugin": release.plugin[:12]}


def driver() -> str:
    """Return the version of the driver that is loaded; ``""`` without one."""
    loaded = Path("/proc/driver/nvidia/version")
    if loaded.is_file():
        # "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.159.03  Release Build"
        return _version_in(loaded.read_text().splitlines()[0])
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    asked = patient_output_of("nvidia-smi", *query)
    return asked.splitlines()[0].strip() if asked else ""


def _docker() -> str:
    return str((docker.ask("/version", 5) or {}).get("Version", ""))


def _toolkit() -> str:
    return _version_in(patient_output_of("nvidia-ctk", "--version") or "")


_ASKED = {"driver": driver, "docker": _docker, "toolkit": _toolkit}


def _version_in(text: str) -> str:
    match = re.search(r"\b\d+\.\d+(\.\d+)*\S*", text)
    return match[0] if match else ""


def read(release: str, paths: Paths) -> dict[str, Any] | None:
    """Return the proof of a release, or ``None``."""
    return files.read_json(paths.proof(release))


def write(proof: dict[str, Any], paths: Paths) -> None:
    """Keep a proof; a passed quick check does not replace a passed full one of the same run."""
    before = read(proof["release"], paths) or {}
    full = before.get("last_full")
    if proof["ok"] and proof["level"] != "quick":
        full = {key: proof[key] for key in ("invocation_id", "checked_at", "versions")}
    same_run = before.get("invocation_id") == proof["invocation_id"]
    if proof["ok"] and proof["level"] == "quick" and same_run and before.get("ok"):
        return
    kept = {"last_full": full, "bench": before.get("bench")}
    files.write_json(paths.proof(proof["release"]), {**proof, **kept})


def withdraw(release: Release, since: str, paths: Paths) -> None:
    """Take back what a failed trial proved: an engine may die after it passed the quick check.

    Args:
        release: The candidate.
        since: When the trial began, as :func:`files.now` writes it; older proofs stay.
        paths: Where the proof is.
    """
    found = read(release.name, paths)
    if found and found["ok"] and found["checked_at"] >= since:
        files.write_json(paths.proof(release.name), {**found, "ok": False})


def bench_due(release: Release, paths: Paths) -> bool:
    """Return whether the speed was never measured under the versions of the last full check."""
    found = read(release.name, paths) or {}
    full, bench = found.get("last_full"), found.get("bench")
    wanted = release.check.bench is not None and release.check.bench.limit_s > 0
    if not wanted or not full:
        return False
    return not bench or bool(upgrades.changed(bench["versions"], full["versions"]))


def bench_before(release: Release, paths: Paths) -> dict[str, Any] | None:
    """Return the measurement to compare with: of this release, else of the last comparable one.

    Comparable is a proven release of the same service, model and profile.
    """
    own = (read(release.name, paths) or {}).get("bench")
    if own:
        return dict(own)
    good = boot.good(release.service, paths)
    for name in (good["release"], *good["previous"]):
        other = load_if_present(name, paths) if name and name != release.name else None
        if other and (other.model, other.profile) == (release.model, release.profile):
            found = (read(other.name, paths) or {}).get("bench")
            if found:
                return dict(found)
    return None


def keep_bench(release: Release, bench: dict[str, Any], paths: Paths) -> None:
    """Keep a measurement with the release's proof."""
    files.write_json(
        paths.proof(release.name), {**(read(release.name, paths) or {}), "bench": bench}
    )


def why_not(
    proof: dict[str, Any] | None, digest: str, invocation_id: str | None, now: dict[str, str]
) -> str | None:
    """Return why the proof does not cover the present run; ``None`` when it does.

    A quick proof of this run is enough when a full one was passed under the same versions.
    """
    if proof is None:
        return "never checked"
    if proof.get("digest") != digest:
        return "the proof is of another release"
    if not proof.get("ok"):
        return "the last check failed"
    if not invocation_id or proof.get("invocation_id") != invocation_id:
        return "the engine was started after the last check"
    full = proof.get("last_full")
    if not full:
        return "only the quick check was run"
    changed = upgrades.changed(full["versions"], now)
    return f"changed since the full check: {', '.join(changed)}" if changed else None
