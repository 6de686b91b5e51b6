"""``spark-deploy share``: write what is served so that somebody else can serve the same."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path

from spark_contract import files
from spark_contract.serving.records import Proof

from spark_deploy.catalog.load import read_file
from spark_deploy.cli.adding.shared import Identity, Shared, Summary, text_of
from spark_deploy.cli.hosts import Listed, answer, listed, planned, say
from spark_deploy.cli.looking import look, status_of
from spark_deploy.cli.taken import Options
from spark_deploy.planning.types import HostPlan

_UNPROVEN = "no host was asked that serves and proved it"


def run(options: Options) -> int:
    """Write the file and say what is in it."""
    hosts = listed(options, judged=False)
    host = hosts[0].serving(*_pair(options.choice, hosts[0]))
    plan = planned(host)
    proof = None if options.unasked else _proof(hosts, plan)
    shared = _shared(host, plan, proof)
    path = Path(options.out or f"{shared.name}.spark.yml")
    files.write_text(path, text_of(shared), 0o644)
    left_out = [f"engine.{name}" for name in _left_out(host)]
    found = {
        "file": str(path), "model": shared.name, "profile": shared.profile_name,
        "sources": shared.sources, "proof": shared.proof,
        "unproven": None if proof else _UNPROVEN,
        "fetched_bytes": sum(source.size_bytes for source in plan.sources),
        "left_out": left_out,
        "next": [shlex.join(["spark-deploy", "add", str(path)])],
    }  # fmt: skip
    answer(options, found, [[f"{path}: written, {_worth(proof)}"]])
    for name in left_out:
        say(f"not in it: {name} of your settings; tell who takes the file")
    return 0


def _pair(choice: str, host: Listed) -> tuple[str, str]:
    """Return model and profile of ``MODEL`` or ``MODEL/PROFILE``."""
    model, _, profile = choice.partition("/")
    settings = host.settings.settings
    for one in settings.all_served:
        if one.model == model and not profile:
            return model, one.profile
    return host.catalog.model(model).name, profile or settings.profile


def _shared(host: Listed, plan: HostPlan, proof: Proof | None) -> Shared:
    root = host.settings.root
    return Shared(
        shared=1,
        name=plan.model,
        model=read_file("models", plan.model, own=root),
        profile_name=plan.profile,
        profile=read_file("profiles", plan.profile, own=root),
        sources=dict(_identities(plan)),
        images={plan.image.base.partition("@")[0]: plan.image.base.partition("@")[2]},
        proof=_summary(proof) if proof else None,
    )


def _identities(plan: HostPlan) -> Iterator[tuple[str, Identity]]:
    donor = plan.checkpoint.donor if plan.checkpoint else None
    for locked in (*(one.locked for one in plan.sources), *((donor,) if donor else ())):
        yield locked.repo, Identity(revision=locked.revision, commit=locked.commit)


def _proof(hosts: list[Listed], plan: HostPlan) -> Proof | None:
    """Return the newest proof of this pair that a host has, of the release that runs there."""
    answers = look(hosts, status_of)
    for one in answers:
        if one.problem:
            say(f"{one.host.name}: {one.problem}")
    found = [
        release.proof
        for said in answers
        if said.value is not None and said.value.told is not None
        for release in said.value.told.releases
        if (release.model, release.profile) == (plan.model, plan.profile)
        and release.proof is not None and release.unproven is None
    ]  # fmt: skip
    return max(found, key=lambda one: one.checked_at, default=None)


def _summary(proof: Proof) -> Summary:
    return Summary(
        level=proof.level,
        ok=proof.ok,
        checked_at=proof.checked_at,
        engine=proof.engine.get("version", ""),
        portable=proof.portable,
        stubbed=proof.stubbed,
        checks={one.name: one.ok for one in proof.checks},
    )


def _worth(proof: Proof | None) -> str:
    if proof is None:
        return f"without a proof: {_UNPROVEN}"
    passed = sum(one.ok for one in proof.checks)
    return f"with the {proof.level} check of {proof.checked_at}, {passed} of {len(proof.checks)}"


def _left_out(host: Listed) -> Iterator[str]:
    """Yield settings of the engine that the host has and the file cannot hold."""
    engine = host.settings.settings.engine
    for field in dataclasses.fields(engine):
        if getattr(engine, field.name) not in (None, {}):
            yield field.name
