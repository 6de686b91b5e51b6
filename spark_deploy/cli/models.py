"""``spark-deploy models``: lists models with fitting profiles; writes new catalog files."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml
from spark_contract import files

from spark_deploy.cli.console import Options, note, print_problem, print_result, shared_options
from spark_deploy.cli.hosts import inventory_path
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.catalog.model import HybridModel, Model, PlainModel
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.checkout import CHECKOUT, catalog_files
from spark_deploy.config.errors import CatalogError, SettingsError, SparkError
from spark_deploy.config.schema_errors import suggest
from spark_deploy.config.settings.host import ClusterSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.lock.resolve import format_size, read_lock
from spark_deploy.lock.types import Lock
from spark_deploy.plan.kv_cache import context_tokens
from spark_deploy.plan.memory import weight_sizes
from spark_deploy.plan.resolve import can_serve, plan_problems
from spark_deploy.plan.speed import compute_speed

HOST_COUNTS = (1, 2, 4)
PLAIN_PROFILE = "plain"  # for repositories served as published


@dataclass(frozen=True, slots=True)
class ListedModel:
    name: str
    summary: str
    choose_when: str
    profiles: dict[int, list[str]]  # profiles that fit, by number of hosts; best first
    choices: dict[str, str]  # when to choose each of these profiles, without stages
    fixes: dict[
        int, str
    ]  # for each number of hosts that is too small: the change that would make the model fit
    is_known: bool  # whether sizes are known, so that `profiles` considers memory
    download_bytes: int | None
    context_tokens: int | None
    tokens_per_s: float | None

    @property
    def hosts(self) -> int | None:
        return next((count for count, names in self.profiles.items() if names), None)


@click.command
@click.argument("search", nargs=-1, metavar="[WORD]...")
@click.option("--all", "shows_all", is_flag=True, help="Include the virtual lab's models.")
@shared_options(hosts=False)
def models(options: Options, search: Sequence[str], shows_all: bool) -> int:
    try:
        root = inventory_path(options).resolve().parents[1]
    except SettingsError:  # not in a folder of `init`: list the shipped models
        root = CHECKOUT
    lock = read_lock(root / Settings().lock_file)
    user_dir = None if root == CHECKOUT else root
    catalog = read_catalog(user_dir=user_dir).with_repo_metadata(lock.repo_metadata)
    for problem in catalog.problems():
        print_problem(problem)
    listed = [
        describe(model, catalog, lock)
        for model in catalog.models.values()
        if (shows_all or not model.name.startswith("lab-")) and _matches(model, search)
    ]
    listed = [model for model in listed if [model.name] == list(search)] or listed
    if not listed:
        fix = suggest(" ".join(search), catalog.models, "run `spark-deploy models` to list all")
        where = f"models {' '.join(search)}"
        raise SparkError.single(where, "no model in the catalog matches", fix)
    listed.sort(key=lambda model: (model.hosts or 99, -(model.tokens_per_s or 0), model.name))
    if options.json:
        print_result(options, listed, ())
    elif len(listed) == 1:
        print_result(options, listed, [_details(listed[0])])
    else:
        print_result(options, listed, [_rows(listed)])
        note("tok/s: computed for one request on one Spark, only for models that we build")
        note("-: unknown; run `spark-deploy use NAME`, then `update` or `up`")
        note("for details, run `spark-deploy models NAME`; to serve it, `spark-deploy use NAME`")
    return 0


def describe(model: Model, catalog: Catalog, lock: Lock) -> ListedModel:
    profiles = {count: find_fitting_profiles(model.name, catalog, count) for count in HOST_COUNTS}
    best = next((names[0] for names in profiles.values() if names), None)
    profile = catalog.profile(best, model.name) if best else None
    hybrid = model.architecture if isinstance(model, HybridModel) else None
    if isinstance(model, PlainModel):
        source = lock.sources.get(model.repository)
        size_bytes = source.size_bytes if source else None
        is_known = model.metadata is not None
    else:
        size_bytes = weight_sizes(model.architecture).tree_bytes
        is_known = True
    return ListedModel(
        name=model.name,
        summary=model.summary,
        choose_when=model.choose_when,
        profiles=profiles,
        choices={
            name: catalog.profile(name, model.name).choose_when
            for name in next(filter(None, profiles.values()), [])
            if not catalog.profile(name, model.name).only_compared
        },
        fixes={
            count: required_change(model.name, best or Settings().profile, catalog, count)
            for count, names in profiles.items()
            if not names
        },
        is_known=is_known,
        download_bytes=size_bytes,
        context_tokens=context_tokens(model, profile) if profile and is_known else None,
        tokens_per_s=compute_speed(hybrid, profile).tokens_per_s if hybrid and profile else None,
    )


def required_change(model: str, profile: str, catalog: Catalog, count: int) -> str:
    """Return the fix that the plan suggests if ``count`` hosts cannot serve a model and profile."""
    return plan_problems(settings_for_hosts(count, model, profile), catalog)[0].fix


def settings_for_hosts(count: int, model: str, profile: str) -> Settings:
    """Return default settings with this model, profile and number of hosts."""
    hosts = tuple(f"spark-{number + 1}" for number in range(count)) if count > 1 else ()
    return Settings(model=model, profile=profile, cluster=ClusterSettings(hosts=hosts))


def find_fitting_profiles(model: str, catalog: Catalog, count: int = 1) -> list[str]:
    """Return the profiles that serve a model on ``count`` hosts, starting with the best."""
    default = Settings().profile
    names = [
        name
        for name, profile_model in catalog.profiles
        if profile_model == model and can_serve(settings_for_hosts(count, model, name), catalog)
    ]
    return sorted(
        names,
        key=lambda name: (
            name != default,
            # `plain` comes first for published checkpoints, and last for checkpoints that we build.
            (name == PLAIN_PROFILE) == isinstance(catalog.model(model), HybridModel),
            catalog.profile(name, model).only_compared,
        ),
    )


def _matches(model: Model, words: Iterable[str]) -> bool:
    if list(words) == [model.name]:
        return True
    text = f"{model.name} {model.summary} {model.choose_when}".lower()
    return all(word.lower() in text for word in words)


def _rows(listed: Sequence[ListedModel]) -> Iterator[str]:
    columns = "{:<30}{:<12}{:>6}{:>11}{:>11}{:>8}".format
    yield columns("model", "profile", "Sparks", "download", "context", "tok/s")
    for model in listed:
        hosts = model.hosts
        yield columns(
            model.name,
            model.profiles[hosts][0] if hosts else "-",
            str(hosts or "none") if model.is_known else "-",
            format_size(model.download_bytes) if model.download_bytes else "-",
            f"{model.context_tokens:,}" if model.context_tokens else "-",
            f"{model.tokens_per_s:.0f}" if model.tokens_per_s and hosts == 1 else "-",
        )
        yield f"    when {model.choose_when}"


def _details(model: ListedModel) -> Iterator[str]:
    yield f"{model.name}: {model.summary}"
    yield f"  choose when {model.choose_when}"
    if not model.is_known:
        yield "  size       unknown; run `spark-deploy use NAME`, then `spark-deploy update`"
    for count, names in model.profiles.items() if model.is_known else ():
        title = f"on {count} Sparks" if count > 1 else "on 1 Spark"
        text = ", ".join(names) or f"no profile fits; {model.fixes[count]}"
        yield f"  {title} {text}"
    for number, (name, choose_when) in enumerate(model.choices.items()):
        yield f"  {'' if number else 'profiles':<10} {name}: {choose_when}"
    if model.download_bytes:
        yield f"  download   {format_size(model.download_bytes)}"
    if model.context_tokens:
        yield f"  context    {model.context_tokens:,} tokens"
    if model.tokens_per_s and model.hosts == 1:
        yield f"  speed      {model.tokens_per_s:.0f} tok/s for one request (computed)"
    if model.hosts:
        yield f"  serve it   spark-deploy use {model.name}/{model.profiles[model.hosts][0]}"


# --- files in the user's catalog

_WIDTH = 96
SCHEMAS = ("hosts", "settings", "model", "plain_model", "profile")


def schema_line(root: Path, file: Path, schema: str) -> str:
    """Return the schema comment for YAML language servers, or "" if the schema is missing."""
    path = f"schema/{schema}.schema.json"
    if not (root / path).is_file():
        return ""
    path_to_root = "../" * len(file.relative_to(root).parent.parts)
    return f"# yaml-language-server: $schema={path_to_root}{path}\n"


@dataclass(slots=True)
class Draft:
    """A new file for ``catalog/models``, with a comment above each key."""

    repository: str
    revision: str = "main"
    about: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    open_questions: list[str] = field(default_factory=list)  # unknown or unused, for the user

    @property
    def name(self) -> str:
        stem = self.repository.rpartition("/")[2].lower()
        return re.sub(r"[^a-z0-9._-]+", "-", stem).strip("._-") or "model"

    def put(self, key: str, value: Any, comment: str = "") -> None:
        if value:
            self.keys[key], self.comments[key] = value, comment

    def text(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        for line in self.about:
            yield from _comment(line)
        keys = {
            "kind": "plain",
            "summary": self.keys.get("summary", f"{self.repository}, as published")[:100],
            "choose_when": "describe when to choose this model",
            "repository": self.repository,
            "revision": self.revision,
            **{key: value for key, value in self.keys.items() if key != "summary"},
        }
        for key, value in keys.items():
            if self.comments.get(key):
                yield ""
                yield from _comment(self.comments[key])
            text = yaml.safe_dump({key: value}, sort_keys=False, width=_WIDTH, allow_unicode=True)
            yield text.rstrip("\n")


def _comment(text: str) -> list[str]:
    printable = "".join(char if char.isprintable() else "?" for char in text)
    line = " ".join(printable.split())
    return textwrap.wrap(line, _WIDTH, initial_indent="# ", subsequent_indent="# ") or ["#"]


def write_files(root: Path, texts: Mapping[tuple[str, str], str], *, force: bool) -> list[Path]:
    """Write catalog files with these texts by kind and name, or no file if any is invalid."""
    paths = {(kind, name): root / "catalog" / kind / f"{name}.yml" for kind, name in texts}
    if not force:
        _reject_existing(paths)
    before = {path: path.read_bytes() if path.exists() else None for path in paths.values()}
    try:
        for (kind, name), path in paths.items():
            text = texts[kind, name]
            is_plain = re.search(r"^kind: plain\b", text, re.MULTILINE)
            model_schema = "plain_model" if is_plain else "model"
            schema = "profile" if kind == "profiles" else model_schema
            files.write_text(path, schema_line(root, path, schema) + text)
        _check(root, list(texts))
    except BaseException:  # includes a full disk and Ctrl-C
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            elif path.read_bytes() != content:
                files.write_chunks(path, [content])
        raise
    for (kind, name), path in paths.items():
        shipped = catalog_files(kind).get(name)
        if shipped is not None and shipped != path:
            note(f"{name}: the new file replaces the shipped {kind} file")
        note(f"{path}: written")
    return list(paths.values())


def _reject_existing(paths: Mapping[tuple[str, str], Path]) -> None:
    for (kind, name), path in paths.items():
        if path.exists():
            fix = "add --force, or remove the file"
            raise CatalogError.single(str(path), "already exists", fix)
        if name in catalog_files(kind):
            problem = "would replace the shipped file with the same name"
            fix = "choose another name, or add --force to replace the shipped file"
            raise CatalogError.single(str(path), problem, fix)


def _check(root: Path, written: list[tuple[str, str]]) -> None:
    """Raise CatalogError if a written model or profile is invalid."""
    catalog = read_catalog(user_dir=root)
    profiles = [name for kind, name in written if kind == "profiles"]
    for kind, model in written:
        if kind == "models":
            catalog.model(model)
            for profile in profiles:
                catalog.profile(profile, model)
