"""Proofs: results of a release's last check; a proof is valid for one run of the unit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spark_contract.records import FullCheck, Proof
from spark_contract.release import Release

from spark_host.records import boot
from spark_host.records.versions import describe_changes
from spark_host.system.host import Host

LEVELS = ("quick", "full", "deep")


def read(release: str, host: Host) -> Proof | None:
    return host.disk.read(Proof, host.paths.proof(release))


def write(proof: Proof, host: Host) -> None:
    """Write a proof, unless it is a quick check of a run that already has a passed proof."""
    before = read(proof.release, host)
    full = before.last_full if before else None
    if proof.ok and proof.level != "quick":
        full = FullCheck(proof.invocation_id, proof.checked_at, proof.versions)
    same_run = before if before and before.invocation_id == proof.invocation_id else None
    if same_run and same_run.ok and proof.ok and proof.level == "quick":
        return
    inherited = {
        name: getattr(same_run, name)
        for name in ("start_memory", "start_times_s", "load_lines", "kv_cache")
        if same_run and not getattr(proof, name)
    }
    bench = before.bench if before else None
    result = replace(proof, last_full=full, bench=bench, **inherited)
    host.disk.write(host.paths.proof(proof.release), result)


def invalidate(release: Release, host: Host) -> None:
    proof = read(release.name, host)
    if proof and proof.ok:
        host.disk.write(host.paths.proof(release.name), replace(proof, ok=False))


def is_bench_due(release: Release, proof: Proof) -> bool:
    """Return whether the speed must be measured again, because versions changed."""
    if release.check.bench is None or release.check.bench.limit_s <= 0 or not proof.last_full:
        return False
    return not proof.bench or bool(
        describe_changes(proof.bench["versions"], proof.last_full.versions)
    )


def read_earlier_bench(release: Release, host: Host) -> dict[str, Any] | None:
    """Return the last measurement of this service with the same model and profile."""
    for name in (release.name, *boot.read_known_good(release.service, host).names):
        other = host.release(name)
        if other and (other.model, other.profile) == (release.model, release.profile):
            proof = read(name, host)
            if proof and proof.bench:
                return dict(proof.bench)
    return None


def unproven_reason(
    proof: Proof | None, digest: str, invocation_id: str | None, current_versions: dict[str, str]
) -> str | None:
    """Return why the proof does not cover the current run.

    A quick check suffices if a full check passed under the same versions.
    """
    if proof is None:
        return "never checked"
    if proof.digest != digest:
        return "the proof belongs to another release"
    if not proof.ok:
        return "the last check failed"
    if not invocation_id or proof.invocation_id != invocation_id:
        return "the engine was started after the last check"
    if not proof.last_full:
        return "only the quick check was run"
    differences = describe_changes(proof.last_full.versions, current_versions)
    return f"changed since the full check: {', '.join(differences)}" if differences else None
