"""What engines counted of KV caches that nobody could compute, from the proofs on hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from spark_deploy.cli.hosts import Target, build_plan
from spark_deploy.cli.query_hosts import query, read_status
from spark_deploy.cli.terminal import note
from spark_deploy.config.catalog.anatomy import Anatomy, CountedCache
from spark_deploy.config.catalog.model import PlainModel
from spark_deploy.hosts.status import HostStatus
from spark_deploy.lock.types import Lock


def with_counts(lock: Lock, hosts: Sequence[Target]) -> Lock:
    """Return the lock with the figures of every host that proved what it is planned to serve."""
    for said in query(hosts, read_status):
        if said.value is None:
            note(f"{said.host.name}: {said.problem}")
            continue
        for found in _counted(said.host, said.value, lock):
            lock = lock.also(anatomies=[found])
            told = found.counted
            if told is not None:
                note(f"  {found.repository}: {told.token_bytes:,} bytes of a token, by {told.by}")
    return lock


def _counted(host: Target, status: HostStatus, lock: Lock) -> Iterator[Anatomy]:
    plan = build_plan(host)
    for one in plan.served:
        model = host.catalog.model(one.model)
        anatomy = lock.anatomies.get(getattr(model, "repository", ""))
        release = status.release(one.serve.name)
        proof = release.proof if release else None
        if not isinstance(model, PlainModel) or anatomy is None or not anatomy.cache_unknown:
            continue
        if proof is None or not proof.ok or proof.kv_cache is None:
            note(f"  {model.repository}: {host.name} has no figure of {one.serve.name} yet")
            continue
        counted = CountedCache(
            kv_cache=host.catalog.profile(one.profile, one.model).kv_cache.dtype,
            context_tokens=one.serve.check.max_model_len,
            token_bytes=max(1, proof.kv_cache.size_bytes // proof.kv_cache.tokens),
            by=f"{host.name}, {one.serve.name}, engine {proof.engine.get('version') or 'unknown'}",
        )
        yield replace(anatomy, counted=counted)
