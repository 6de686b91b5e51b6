"""``spark-deploy update``: lock commits and image digests for the names in use."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click

from spark_deploy.cli.console import Options, note, shared_options
from spark_deploy.cli.hosts import Target, build_plan, query_or_note, read_status, select_hosts
from spark_deploy.config.catalog.architecture import MeasuredCache, RepoMetadata
from spark_deploy.config.catalog.model import PlainModel
from spark_deploy.config.documents import to_yaml_data
from spark_deploy.config.errors import LockError
from spark_deploy.config.schema_errors import suggest
from spark_deploy.hosts.status import HostStatus
from spark_deploy.inventory.plans import (
    unread_repositories,
    unverified_builds,
    verify_names_if_online,
)
from spark_deploy.lock.resolve import (
    Names,
    check_single_revisions,
    read_lock,
    required_names,
    resolve,
    write_lock,
)
from spark_deploy.lock.types import Lock, VerifiedNames, names_to_verify
from spark_deploy.plan.jobs import built_title
from spark_deploy.plan.types import CheckpointPlan, SourcePlan


@click.command
@click.option("--only", multiple=True, metavar="NAME", help="Lock only this repository or image.")
@click.option("--missing", is_flag=True, help="Lock only names that are not locked yet.")
@click.option(
    "--check", is_flag=True, help="Change nothing; exit with status 1 if a name is missing."
)
@click.option(
    "--from-hosts", "with_host_values", is_flag=True,
    help="Read KV-cache sizes and FP8 source hashes from hosts.",
)  # fmt: skip
@shared_options(plans=True)
def update(
    options: Options, only: Sequence[str], missing: bool, check: bool, with_host_values: bool
) -> int:
    return lock_names(
        options, only, only_missing=missing, check_only=check, with_host_values=with_host_values
    )


def lock_names(
    options: Options,
    only: Sequence[str] = (),
    *,
    only_missing: bool = False,
    check_only: bool = False,
    with_host_values: bool = False,
) -> int:
    hosts_by_lock: dict[Path, list[Target]] = {}
    for host in select_hosts(options):
        hosts_by_lock.setdefault(host.loaded.lock_path, []).append(host)
    is_incomplete = False
    for path, hosts in hosts_by_lock.items():
        _reject_unknown_names(only, hosts)
        missing = only_missing or check_only
        lock, names = _resolve(path, hosts, only, only_missing=missing, offline=check_only)
        if check_only:
            problems = {f"{name} is not locked" for name in names}
            problems = problems or set(_unverified_problems(hosts, lock))
            for problem in sorted(problems):
                note(f"{path.name}: {problem}")
            is_incomplete |= bool(problems)
            continue
        for host in hosts:
            lock = verify_names_if_online(host.settings, host.catalog, lock, note)
        _write_lock(path, _with_host_values(lock, hosts) if with_host_values else lock)
    if options.json:
        locks = {str(path): read_lock(path) for path in hosts_by_lock}
        data = {path: to_yaml_data(lock, include_nulls=False) for path, lock in locks.items()}
        print(json.dumps(data, indent=1))
    return int(is_incomplete)


def _resolve(
    path: Path, hosts: list[Target], only: Sequence[str], *, only_missing: bool, offline: bool
) -> tuple[Lock, set[str]]:
    """Look up the names that hosts require; return the new lock and the selected names.

    ``only`` and ``only_missing`` select the names; ``offline`` prevents the lookup.
    """
    lock, selected = read_lock(path), set[str]()
    required_by_host = [required_names(host.settings, host.catalog) for host in hosts]
    check_single_revisions(set().union(*(required.sources for required in required_by_host)))
    for host, wanted in zip(hosts, required_by_host, strict=True):
        if only:
            sources = ((repo, revision) for repo, revision in wanted.sources if repo in only)
            wanted = Names(frozenset(sources), wanted.images.intersection(only))
        if only_missing:
            wanted = wanted.missing_in(lock)
        wanted = wanted.without(selected)
        selected.update(wanted.names)
        if wanted.names and not offline:
            engines = host.catalog.engines.engines
            lock = resolve(lock, wanted, host.settings, engines, note)
    return lock, selected


def _reject_unknown_names(only: Sequence[str], hosts: list[Target]) -> None:
    required_by_host = (required_names(host.settings, host.catalog) for host in hosts)
    known = sorted({name for required in required_by_host for name in required.names})
    for name in only:
        if name not in known:
            fix = suggest(name, known, f"choose from: {', '.join(known)}")
            raise LockError.single(
                f"--only {name}", "no selected host uses this repository or image", fix
            )


def _unverified_problems(hosts: list[Target], lock: Lock) -> Iterator[str]:
    """Yield builds whose tensor names are unverified, and repositories whose headers are unread."""
    for host in hosts:
        settings, catalog = host.settings, host.catalog
        for names, _ in unverified_builds(settings, catalog, lock):
            yield f"tensor names in {names.build} have not been verified"
        for unread in unread_repositories(settings, catalog, lock):
            yield f"headers of {unread.repository} have not been read"


def _write_lock(path: Path, lock: Lock) -> None:
    before = read_lock(path)
    if lock == before:
        count = len(lock.sources) + len(lock.images)
        note(f"{path}: no changes; {count} names are locked")
        return
    write_lock(path, lock)
    old, new = _entries(before), _entries(lock)
    added_count = len(new.keys() - old.keys())
    moved_count = sum(1 for key in new.keys() & old.keys() if new[key] != old[key])
    note(f"{path}: written ({added_count} added, {moved_count} moved)")


def _entries(lock: Lock) -> dict[tuple[str, str], object]:
    return {
        (kind, name): value
        for kind in ("sources", "images", "names", "repo_metadata")
        for name, value in getattr(lock, kind).items()
    }


def lock_donor_tensors(hosts: Sequence[Target]) -> None:
    """After a first build, lock the hashes of the FP8 source tensors, unless `locked: required`."""
    hosts_by_lock: dict[Path, list[Target]] = {}
    for host in hosts:
        lock = read_lock(host.loaded.lock_path)
        if host.settings.locked != "required" and any(
            lock.has_result_for(names) and lock.donor_sha256(names) is None
            for names, _ in _donor_builds(host)
        ):
            hosts_by_lock.setdefault(host.loaded.lock_path, []).append(host)
    for path, hosts_without_hash in hosts_by_lock.items():
        lock = before = read_lock(path)
        for host, status in query_or_note(hosts_without_hash, read_status):
            lock = _with_donor_hashes(lock, host, status)
        if lock != before:
            _write_lock(path, lock)


def _donor_builds(host: Target) -> Iterator[tuple[VerifiedNames, CheckpointPlan]]:
    """Yield the builds of a host that read FP8 source tensors, with their names in the lock."""
    host_plan = build_plan(host)
    for served in (*host_plan.served, *host_plan.ready):
        plan = served.checkpoint
        if plan and plan.donor and isinstance(plan.base, SourcePlan):
            yield names_to_verify(plan.build, plan.base.locked, plan.donor), plan


def _with_donor_hashes(lock: Lock, host: Target, status: HostStatus) -> Lock:
    states = {state.title: state for state in (status.report.jobs if status.report else ())}
    for names, build in _donor_builds(host):
        state = states.get(built_title(build))
        sha256 = state.donor_sha256 if state else None
        locked = lock.donor_sha256(names)
        if sha256 is None or not lock.has_result_for(names):
            continue
        if locked not in (None, sha256):
            raise LockError.single(
                f"{host.name}: {build.dir}",
                f"was built from FP8 tensors with sha256 {sha256}, but the lock has {locked}",
                "find out which hub or proxy sent different data; "
                "if the host has the wrong data, rename the directory on the host and deploy again",
            )
        if locked is None:
            note(f"  {names.build}: {host.name} used FP8 source tensors with sha256 {sha256}")
            lock = lock.with_entries(names=[replace(lock.names[names.build], donor_sha256=sha256)])
    return lock


def _with_host_values(lock: Lock, hosts: Sequence[Target]) -> Lock:
    """Add KV-cache sizes that checked engines measured, and hashes of FP8 source tensors."""
    for host, status in query_or_note(hosts, read_status):
        lock = _with_donor_hashes(lock, host, status)
        for metadata in _measured_metadata(host, status, lock):
            lock = lock.with_entries(repo_metadata=[metadata])
            if size := metadata.measured:
                text = f"{size.token_bytes:,} bytes per token, measured by {size.by}"
                note(f"  {metadata.repository}: {text}")
    return lock


def _measured_metadata(host: Target, status: HostStatus, lock: Lock) -> Iterator[RepoMetadata]:
    for served in build_plan(host).served:
        model = host.catalog.model(served.model)
        metadata = lock.repo_metadata.get(getattr(model, "repository", ""))
        deployed = status.release(served.release.name)
        proof = deployed.proof if deployed else None
        if not isinstance(model, PlainModel) or metadata is None or not metadata.cache_unknown:
            continue
        if proof is None or not proof.ok or proof.kv_cache is None:
            note(f"  {model.repository}: {host.name} has not yet measured {served.release.name}")
            continue
        engine = proof.engine.get("version") or "unknown"
        size = MeasuredCache(
            kv_cache=host.catalog.profile(served.profile, served.model).kv_cache.dtype,
            context_tokens=served.release.check.max_model_len,
            token_bytes=max(1, proof.kv_cache.size_bytes // proof.kv_cache.tokens),
            by=f"{host.name}, {served.release.name}, engine {engine}",
        )
        yield replace(metadata, measured=size)
