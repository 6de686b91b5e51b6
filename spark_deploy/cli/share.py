"""``spark-deploy share``: write a model, its profile and lock to a file; install such files.

The file contains only catalog data; values that look like secrets are rejected.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import click
import yaml
from pydantic import Field
from pydantic.dataclasses import dataclass
from spark_contract import files
from spark_contract.records import Proof
from spark_contract.units import COMMIT

from spark_deploy.cli.console import (
    FILE,
    Options,
    name_completer,
    note,
    print_result,
    shared_options,
)
from spark_deploy.cli.hosts import Target, build_plan, query_or_note, read_status, select_hosts
from spark_deploy.cli.models import write_files
from spark_deploy.config.catalog.load import read_file
from spark_deploy.config.documents import CLOSED, convert, schema_of, to_yaml_data
from spark_deploy.config.errors import CatalogError, LockError, Problem, one_line
from spark_deploy.config.schema_errors import dotted, schema_problems
from spark_deploy.config.settings import allowed
from spark_deploy.config.settings.engine import canonical_options
from spark_deploy.config.settings.service import CatalogName
from spark_deploy.lock import hub
from spark_deploy.lock.resolve import read_hub_token, read_lock, validate_lock, write_lock
from spark_deploy.lock.types import LockedSource, image_name
from spark_deploy.plan.types import HostPlan

_HEAD = """\
# Written by `spark-deploy share`. To serve the model, run `spark-deploy add THIS-FILE`, then `use`.
# Use files only from authors you trust, because they choose the commit and the engine options.
"""
_SECRET = re.compile(
    r"(?i)\b(?:bearer|basic)\s+\S{8,}|\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|nvapi-|xox[abpr]-"
    r"|AKIA)[\w-]{8,}|\beyJ[\w-]+\.[\w-]+\.|://[^/\s@:]+:[^/\s@]*@|-----BEGIN "
)
_SECRET_KEY = re.compile(r"(?i)(token|secret|password|api[-_]?key)$")
_UNPROVEN = "this release has not passed its check on any selected host"


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Identity:
    revision: str = Field(max_length=200)  # as requested
    commit: str = Field(json_schema_extra={"pattern": f"^{COMMIT}$"})


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Summary:
    """The last check of the model and profile on the author's host."""

    level: str = Field(max_length=20)  # quick, full or deep
    ok: bool
    checked_at: str = Field(max_length=40)  # UTC
    engine: str = Field(max_length=80)  # version
    portable: bool
    stubbed: tuple[str, ...] = ()  # stand-ins from the virtual lab
    checks: dict[str, bool] = Field(default_factory=dict)  # by name; True if passed


@dataclass(frozen=True, slots=True, config=CLOSED)
class Shared:
    shared: Literal[1]  # version of this format
    name: CatalogName
    model: dict[str, Any]
    profile_name: CatalogName
    profile: dict[str, Any]
    sources: dict[str, Identity] = Field(default_factory=dict)
    images: dict[str, str] = Field(default_factory=dict)  # for information
    proof: Summary | None = None


@click.command
@click.argument("choice", metavar="MODEL|MODEL/PROFILE", shell_complete=name_completer("models"))
@click.option("--out", metavar="FILE", type=FILE, help="Output file [MODEL.spark.yml].")
@click.option("--offline", is_flag=True, help="Do not contact hosts; omit the check result.")
@shared_options()
def share(options: Options, choice: str, out: str | None, offline: bool) -> int:
    hosts = select_hosts(options, must_serve=False)
    host = hosts[0].with_model(*_parse_choice(choice, hosts[0]))
    plan = build_plan(host)
    proof = None if offline else _newest_proof(hosts, plan)
    shared = _make_shared(host, plan, proof)
    path = Path(out or f"{shared.name}.spark.yml")
    files.write_text(path, render_shared(shared), 0o644)
    engine = host.settings.engine
    left_out = [
        f"engine.{field.name}"
        for field in fields(engine)
        if getattr(engine, field.name) not in (None, {})
    ]
    data = {
        "file": str(path), "model": shared.name, "profile": shared.profile_name,
        "sources": shared.sources, "proof": shared.proof,
        "unproven": None if proof else _UNPROVEN,
        "fetched_bytes": sum(source.size_bytes for source in plan.sources),
        "left_out": left_out,
        "next": [shlex.join(["spark-deploy", "add", str(path)])],
    }  # fmt: skip
    result = f"without a check result: {_UNPROVEN}"
    if proof:
        passed = f"{sum(check.ok for check in proof.checks)} of {len(proof.checks)} passed"
        result = f"{proof.level} check of {proof.checked_at}, {passed}"
    print_result(options, data, [[f"{path}: written, {result}"]])
    for name in left_out:
        note(f"the file does not contain your setting {name}; send it separately")
    return 0


def _parse_choice(choice: str, host: Target) -> tuple[str, str]:
    """Return model and profile; the default is the profile with which the host serves the model."""
    model, _, profile = choice.partition("/")
    settings = host.settings
    for served in settings.all_models:
        if served.model == model and not profile:
            return model, served.profile
    return host.catalog.model(model).name, profile or settings.profile


def _make_shared(host: Target, plan: HostPlan, proof: Proof | None) -> Shared:
    root = host.loaded.root
    locked = [source.locked for source in plan.sources]
    if plan.checkpoint and plan.checkpoint.donor:
        locked.append(plan.checkpoint.donor)
    image, _, digest = plan.image.base.partition("@")
    summary = None
    if proof:
        summary = Summary(
            level=proof.level,
            ok=proof.ok,
            checked_at=proof.checked_at,
            engine=proof.engine.get("version", ""),
            portable=proof.portable,
            stubbed=proof.stubbed,
            checks={check.name: check.ok for check in proof.checks},
        )
    return Shared(
        shared=1,
        name=plan.model,
        model=read_file("models", plan.model, user_dir=root),
        profile_name=plan.profile,
        profile=read_file("profiles", plan.profile, user_dir=root),
        sources={
            source.repo: Identity(revision=source.revision, commit=source.commit)
            for source in locked
        },
        images={image: digest},
        proof=summary,
    )


def _newest_proof(hosts: list[Target], plan: HostPlan) -> Proof | None:
    """Return the latest valid check result for the plan's model and profile on these hosts."""
    proofs: list[Proof] = []
    for _, status in query_or_note(hosts, read_status):
        proofs += [
            release.proof
            for release in (status.report.releases if status.report else ())
            if (release.model, release.profile) == (plan.model, plan.profile)
            and release.proof is not None and release.unproven is None
        ]  # fmt: skip
    return max(proofs, key=lambda proof: proof.checked_at, default=None)


def render_shared(shared: Shared) -> str:
    data = to_yaml_data(shared, include_nulls=False)
    problems = [
        Problem(f"{shared.name}: {dotted(path)}", "looks like a secret", "remove it from the file")
        for path, value in _leaves(data, ())
        if _SECRET.search(str(value)) or _SECRET_KEY.search(str(path[-1]))
    ]
    if problems:
        raise CatalogError(problems)
    return _HEAD + yaml.safe_dump(data, sort_keys=False, width=100, allow_unicode=True)


def _leaves(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _leaves(item, (*path, number))
    elif value not in (None, False):
        yield path, value


def read_shared(data: Mapping[str, Any], source: str) -> Shared:
    problems = list(schema_problems(dict(data), schema_of(Shared, "shared"), lambda path: source))
    if problems:
        raise CatalogError(problems)
    return convert(Shared, dict(data))


def install(shared: Shared, host: Target, *, force: bool) -> tuple[list[Path], list[str]]:
    """Write a shared model and profile, and lock their commits; return files and open questions.

    Raises SparkError, before any change, if the content is invalid or the hub lacks a commit.
    """
    root = host.loaded.root
    if unlisted := [*_unlisted(shared.model), *_unlisted(shared.profile)]:
        fix = f"remove it from the file; {allowed.FIX}"
        raise CatalogError([Problem(one_line(path), allowed.NOT_LISTED, fix) for path in unlisted])
    contents = {
        ("models", shared.name): shared.model,
        ("profiles", shared.profile_name): shared.profile,
    }
    texts = {}
    for (kind, name), keys in contents.items():
        existing: dict[str, object] | None = None
        with suppress(CatalogError):  # the file does not exist yet
            existing = read_file(kind, name, user_dir=root)
        if existing != keys:
            head = f"# Added by `spark-deploy add` from the shared file for model {shared.name}.\n"
            text = yaml.safe_dump(dict(keys), sort_keys=False, width=96, allow_unicode=True)
            texts[kind, name] = head + text
    locked = list(_locked_sources(shared, host))
    written = write_files(root, texts, force=force)
    path = host.loaded.lock_path
    lock = read_lock(path)
    changed = validate_lock(lock.with_entries(locked))
    if changed != lock:
        write_lock(path, changed)
        note(f"{path}: {len(locked)} repositories locked to the commits in the shared file")
        written.append(path)
    return written, list(_open_questions(shared, host))


def _unlisted(value: Any) -> Iterator[str]:
    """Yield engine options and variables that are not on the allowlist, at any depth."""
    if isinstance(value, Mapping):
        options = {str(name): item for name, item in _items(value.get("options"))}
        environment = {str(name): str(item) for name, item in _items(value.get("environment"))}
        yield from allowed.find_unlisted(canonical_options(options), environment)
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _unlisted(item)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, Mapping) else ()


def _locked_sources(shared: Shared, host: Target) -> Iterator[LockedSource]:
    """Yield the shared commits with the files that the hub lists.

    Rejects repositories that the shared model and profile do not use, because a shared file must
    not change the lock of other models.
    """
    settings, lock = host.settings.hub, read_lock(host.loaded.lock_path)
    token = read_hub_token(settings)
    names = {str(value) for _, value in _leaves([shared.model, shared.profile], ())}
    for repo, source in shared.sources.items():
        if repo not in names:
            problem = f"neither {shared.name} nor {shared.profile_name} uses this repository"
            fix = "remove the repository from `sources` in the file"
            raise LockError.single(repo, problem, fix)
        existing = lock.sources.get(repo)
        if existing is not None and existing.commit != source.commit:
            problem = f"is locked at {existing.commit[:12]}, but the file has {source.commit[:12]}"
            fix = f"remove it from {host.loaded.lock_path.name} to use the commit in the file"
            raise LockError.single(repo, problem, fix)
        on_hub = hub.look_up_repo(settings.endpoint, repo, source.commit, token)
        if on_hub.commit != source.commit:
            problem = f"the hub has no commit {source.commit}"
            raise LockError.single(repo, problem, "ask the file's author for another file")
        yield replace(on_hub, revision=source.revision)


def _open_questions(shared: Shared, host: Target) -> Iterator[str]:
    settings = host.settings
    images = {image_name(image) for image in settings.images.values()}
    for reference, digest in shared.images.items():
        if reference not in images:
            yield f"the author used another image: {reference}@{digest[:19]}"
    token = read_hub_token(settings.hub)
    for repo, source in shared.sources.items():
        try:
            current = hub.look_up_repo(settings.hub.endpoint, repo, source.revision, token).commit
        except LockError as error:
            yield error.problems[0].line
            continue
        if current != source.commit:
            yield (
                f"{repo}: {source.revision} is now {current[:12]}, "
                f"but the file has {source.commit[:12]}"
            )
    proof = shared.proof
    if proof is None:
        yield "the file contains no check result"
        return
    checks = f"{sum(proof.checks.values())} of {len(proof.checks)} passed"
    portable = ", PORTABLE MODE" if proof.portable else ""
    yield (
        f"checked by the author: {proof.level} check of {proof.checked_at}, "
        f"{checks} with engine {proof.engine or 'unknown'}{portable}"
    )
