"""Read ``catalog/`` once: models, profiles as each model wants them, guard rails."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from spark_deploy.catalog.engines import Engines
from spark_deploy.catalog.model import RENAMED, AnyModel, HybridModel, Model, PlainModel
from spark_deploy.catalog.profile import Profile
from spark_deploy.catalog.questions import OpenQuestions
from spark_deploy.catalog.rails import GuardRails, all_hold
from spark_deploy.catalog.types import Catalog
from spark_deploy.checkout import CHECKOUT, catalog_names
from spark_deploy.documents.declare import Schema, convert
from spark_deploy.documents.files import load_schema, read_mapping
from spark_deploy.documents.schema_check import dotted, problems_of
from spark_deploy.errors import CatalogError, Problem
from spark_deploy.settings.load import merge

_Data = dict[str, Any]
_Document = TypeVar(
    "_Document", HybridModel, PlainModel, Profile, GuardRails, Engines, OpenQuestions
)
# What is said of one profile is not true of those that differ from it.
_OWN_OF_PROFILES = ("summary", "choose_when", "published", "proven")


def read_catalog(checkout: Path = CHECKOUT) -> Catalog:
    """Return all of ``catalog/``; a file with mistakes stops only who names it."""
    models: dict[str, Model] = {}
    profiles: dict[tuple[str, str], Profile] = {}
    broken: dict[tuple[str, ...], tuple[Problem, ...]] = {}
    for name in catalog_names("models", checkout=checkout):
        try:
            models[name] = _model(name, checkout)
        except CatalogError as error:
            broken[f"models/{name}",] = error.problems
    schema = load_schema("profile", checkout=checkout)
    for name in catalog_names("profiles", checkout=checkout):
        shown = f"catalog/profiles/{name}.yml"
        try:
            data = _joined("profiles", name, checkout, own=_OWN_OF_PROFILES)
            plain = _checked(Profile, data, schema, shown, name=name)
        except CatalogError as error:
            broken[f"profiles/{name}",] = error.problems
            continue
        for model in models.values():
            try:
                profiles[name, model.name] = _as_wanted(model, plain, data, schema)
            except CatalogError as error:
                broken[name, model.name] = error.problems
    shown = "catalog/guard_rails.yml"
    schema = load_schema("guard_rails", checkout=checkout)
    rails = _checked(GuardRails, _read(shown, checkout), schema, shown).rails
    shown = "catalog/engines.yml"
    engines = _checked(
        Engines, _read(shown, checkout), load_schema("engines", checkout=checkout), shown
    )
    return Catalog(models, profiles, rails, engines, broken)


def read_questions(checkout: Path = CHECKOUT) -> OpenQuestions:
    """Return ``catalog/open_questions.yml``."""
    shown = "catalog/open_questions.yml"
    schema = load_schema("open_questions", checkout=checkout)
    return _checked(OpenQuestions, _read(shown, checkout), schema, shown)


def _model(name: str, checkout: Path) -> Model:
    shown = f"catalog/models/{name}.yml"
    data = _joined("models", name, checkout)
    # Whatever else it says: only one word chooses the form that the file is checked against.
    if data.get("kind") == "plain":
        schema = load_schema("plain_model", checkout=checkout)
        return _checked(PlainModel, data, schema, shown, name=name)
    return _checked(HybridModel, data, load_schema("model", checkout=checkout), shown, name=name)


def _joined(kind: str, name: str, checkout: Path, own: tuple[str, ...] = ()) -> _Data:
    """Return a file merged into the one it is based on, whose keys ``own`` are left there."""
    shown = f"catalog/{kind}/{name}.yml"
    data = _read(shown, checkout)
    parent = data.pop("based_on", None)
    if parent is None:
        return data
    below = _read(f"catalog/{kind}/{parent}.yml", checkout)
    if "based_on" in below:
        what = f"is based on {parent}, which is itself based on another"
        raise CatalogError.one(shown, what, f"base it on {below['based_on']} directly")
    inherited = {key: value for key, value in below.items() if key not in own}
    return merge(inherited, data, null_keeps=False)


def _as_wanted(model: Model, plain: Profile, data: _Data, schema: Schema) -> Profile:
    """Return a profile with what the model changes of it: rules in order, each sees the file's."""
    changes = [one.set for one in model.changes if all_hold(one.when, plain.traits)]
    changed = data
    for change in changes:
        changed = merge(changed, change, null_keeps=False)
    if changes:
        shown = f"catalog/models/{model.name}.yml: changes of profile {plain.name}"
        plain = _checked(Profile, changed, schema, shown, name=plain.name)
    return dataclasses.replace(plain, engine_mode=model.image.engine_mode)


def _read(shown: str, checkout: Path) -> _Data:
    data, problems = read_mapping(checkout / shown, shown=shown)
    if problems:
        raise CatalogError(problems)
    return data


def _checked(
    kind: type[_Document], data: _Data, schema: Schema, shown: str, **of_file: str
) -> _Document:
    """Return a document that follows its schema and its own rules."""
    if problems := list(problems_of(data, schema, lambda path: shown, RENAMED)):
        raise CatalogError(problems)
    document = convert(kind, {**data, **of_file})
    broken = tuple(document.broken()) if isinstance(document, (AnyModel, Profile)) else ()
    if broken:
        raise CatalogError(
            [Problem(f"{shown}: {dotted(one.key)}", one.what, one.fix) for one in broken]
        )
    return document
