"""``spark-deploy share``: write what is served so that somebody else can serve the same."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import yaml
from spark_contract import files
from spark_contract.records import Proof
from spark_contract.units import COMMIT

from spark_deploy.cli.hosts import Target, build_plan, select_hosts
from spark_deploy.cli.options import FILE, Options, names_of, shared_options
from spark_deploy.cli.query_hosts import query, read_status
from spark_deploy.cli.terminal import note, print_result
from spark_deploy.config.catalog.load import read_file
from spark_deploy.config.documents.declare import convert, needed, schema_of, setting, typed
from spark_deploy.config.documents.schema_check import dotted, problems_of
from spark_deploy.config.errors import CatalogError, Problem
from spark_deploy.config.settings.service import CATALOG_NAME
from spark_deploy.plan.types import HostPlan

# ``spark-deploy share`` writes it and ``spark-deploy add`` takes it. It holds what catalog files
# say and nothing of hosts or settings, so no secret has a way into it; what looks like one is
# refused.


_HEAD = """\
# Written by `spark-deploy share`. To serve the same: `spark-deploy add THIS-FILE`, then `use`.
# Take files of people you trust: they say which commit is fetched and with which options it runs.
"""
_SECRET = re.compile(
    r"(?i)\b(?:bearer|basic)\s+\S{8,}|\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|nvapi-|xox[abpr]-"
    r"|AKIA)[\w-]{8,}|\beyJ[\w-]+\.[\w-]+\.|://[^/\s@:]+:[^/\s@]*@|-----BEGIN "
)
_SECRET_KEY = re.compile(r"(?i)(token|secret|password|api[-_]?key)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A repository as it was locked."""

    revision: str = needed("What was asked for.", maxLength=200)
    commit: str = needed("What it was.", pattern=f"^{COMMIT}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the last check of the pair found where it was served."""

    level: str = needed("How much was asked: quick, full or deep.", maxLength=20)
    ok: bool = needed("Whether all that must be right was right.")
    checked_at: str = needed("When, in UTC.", maxLength=40)
    engine: str = needed("Version of the engine.", maxLength=80)
    portable: bool = needed("Without the kernels of a Spark.")
    stubbed: tuple[str, ...] = setting((), "Parts that were stand-ins.")
    checks: dict[str, bool] = setting(dict, "Each check, and whether it was passed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The whole file."""

    shared: Literal[1] = needed("Format of this file.")
    name: str = needed("Of the model.", **CATALOG_NAME)
    model: dict[str, Any] = needed("The model's file, whole.")
    profile_name: str = needed("Of the profile.", **CATALOG_NAME)
    profile: dict[str, Any] = needed("The profile's file, whole.")
    sources: dict[str, Identity] = setting(dict, "Repositories as they were locked.")
    images: dict[str, str] = setting(dict, "Images as they were locked; told, never taken over.")
    proof: Summary | None = setting(None, "Null: no host that serves it was asked, or none does.")

    @property
    def model_repository(self) -> str:
        """What the model is made of, in a few words."""
        return str(self.model.get("repository") or self.name)

    @property
    def words(self) -> frozenset[str]:
        """What model and profile say, wherever it stands."""
        said = {"model": self.model, "profile": self.profile}
        return frozenset(str(value) for _, value in _leaves(said, ()))


def text_of(shared: Shared) -> str:
    """Return the file.

    Raises:
        CatalogError: something in it looks like a secret.
    """
    data = typed(shared, nulls=False)
    found = [
        Problem(f"{shared.name}: {dotted(path)}", "looks like a secret", "take it out of the file")
        for path, value in _leaves(data, ())
        if _SECRET.search(str(value)) or _SECRET_KEY.search(str(path[-1]))
    ]
    if found:
        raise CatalogError(found)
    return _HEAD + yaml.safe_dump(data, sort_keys=False, width=100, allow_unicode=True)


def read(data: Mapping[str, Any], source: str) -> Shared:
    """Return what somebody shared.

    Raises:
        CatalogError: it is not of the form that ``share`` writes.
    """
    problems = list(problems_of(dict(data), schema_of(Shared, "shared"), lambda path: source))
    if problems:
        raise CatalogError(problems)
    return convert(Shared, dict(data))


def _leaves(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _leaves(one, (*path, number))
    elif value not in (None, False):
        yield path, value


_UNPROVEN = "no host was asked that serves and proved it"


@click.command
@click.argument("choice", metavar="MODEL|MODEL/PROFILE", shell_complete=names_of("models"))
@click.option("--out", metavar="FILE", type=FILE, help="Output file [MODEL.spark.yml].")
@click.option("--unasked", is_flag=True, help="Work offline; include no check result.")
@shared_options()
def share(options: Options, choice: str, out: str | None, unasked: bool) -> int:
    """Write the file and print a summary."""
    hosts = select_hosts(options, judged=False)
    host = hosts[0].serving(*_pair(choice, hosts[0]))
    plan = build_plan(host)
    proof = None if unasked else _proof(hosts, plan)
    shared = _shared(host, plan, proof)
    path = Path(out or f"{shared.name}.spark.yml")
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
    print_result(options, found, [[f"{path}: written, {_worth(proof)}"]])
    for name in left_out:
        note(f"not in it: {name} of your settings; tell who takes the file")
    return 0


def _pair(choice: str, host: Target) -> tuple[str, str]:
    """Return model and profile of ``MODEL`` or ``MODEL/PROFILE``."""
    model, _, profile = choice.partition("/")
    settings = host.settings.settings
    for one in settings.all_served:
        if one.model == model and not profile:
            return model, one.profile
    return host.catalog.model(model).name, profile or settings.profile


def _shared(host: Target, plan: HostPlan, proof: Proof | None) -> Shared:
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


def _proof(hosts: list[Target], plan: HostPlan) -> Proof | None:
    """Return the newest proof of this pair that a host has, of the release that runs there."""
    answers = query(hosts, read_status)
    for one in answers:
        if one.problem:
            note(f"{one.host.name}: {one.problem}")
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


def _left_out(host: Target) -> Iterator[str]:
    """Yield settings of the engine that the host has and the file cannot hold."""
    engine = host.settings.settings.engine
    for field in dataclasses.fields(engine):
        if getattr(engine, field.name) not in (None, {}):
            yield field.name
