"""Read the files of ``catalog/``: models, profiles and the guard rails between them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from spark_deploy.catalog.model import Architecture, Model
from spark_deploy.catalog.profile import Profile
from spark_deploy.catalog.rails import GuardRail, GuardRails
from spark_deploy.checkout import CHECKOUT, catalog_names
from spark_deploy.documents.declare import Schema, convert
from spark_deploy.documents.schema_check import dotted, load_schema, problems_of
from spark_deploy.documents.yamlfile import read_mapping
from spark_deploy.errors import CatalogError, Problem
from spark_deploy.settings.load import merge

__all__ = [
    "Architecture",
    "GuardRail",
    "Model",
    "Profile",
    "load_guard_rails",
    "load_model",
    "load_profile",
]
_MODE: Schema = {"description": "native or portable.", "enum": ["native", "portable"]}


@functools.cache
def load_model(name: str, *, checkout: Path = CHECKOUT) -> Model:
    """Return the model of ``catalog/models/<name>.yml``."""
    shown = f"catalog/models/{name}.yml"
    data = _read("models", name, checkout)
    parent = data.pop("based_on", None)
    if parent is not None:
        below = _read("models", parent, checkout)
        if "based_on" in below:
            what = f"is based on {parent}, which is itself based on another model"
            raise CatalogError.one(shown, what, f"base it on {below['based_on']} directly")
        data = merge(below, data, null_keeps=False)
    _refuse(data, load_schema("model", checkout=checkout), shown)
    model = convert(Model, {**data, "name": name})
    _refuse_broken(model, shown)
    return model


@functools.cache
def load_profile(name: str, model_name: str, *, checkout: Path = CHECKOUT) -> Profile:
    """Return a profile as one model wants it: the file with the model's overrides merged in."""
    shown = f"catalog/profiles/{name}.yml"
    data = _read("profiles", name, checkout)
    schema = load_schema("profile", checkout=checkout)
    _refuse(data, schema, shown)
    change = load_model(model_name, checkout=checkout).profile_overrides.get(name, {})
    if change:
        shown = f"catalog/models/{model_name}.yml profile_overrides.{name}"
        data = merge(data, change, null_keeps=False)
        with_mode = {**schema["properties"], "engine_mode": _MODE}
        _refuse(data, {**schema, "properties": with_mode}, shown)
    profile = convert(Profile, {**data, "name": name})
    _refuse_broken(profile, shown)
    return profile


@functools.cache
def load_guard_rails(*, checkout: Path = CHECKOUT) -> tuple[GuardRail, ...]:
    """Return the rules of ``catalog/guard_rails.yml``."""
    shown = "catalog/guard_rails.yml"
    data, problems = read_mapping(checkout / shown, shown=shown)
    if problems:
        raise CatalogError(problems)
    _refuse(data, load_schema("guard_rails", checkout=checkout), shown)
    return convert(GuardRails, data).rails


def _read(kind: str, name: str, checkout: Path) -> dict[str, Any]:
    shown = f"catalog/{kind}/{name}.yml"
    known = catalog_names(kind, checkout=checkout)
    if name not in known:
        raise CatalogError.one(shown, "does not exist", f"known here: {', '.join(known)}")
    data, problems = read_mapping(checkout / shown, shown=shown)
    if problems:
        raise CatalogError(problems)
    return data


def _refuse(data: dict[str, Any], schema: Schema, shown: str) -> None:
    problems = list(problems_of(data, schema, lambda path: shown))
    if problems:
        raise CatalogError(problems)


def _refuse_broken(document: Model | Profile, shown: str) -> None:
    problems = [
        Problem(f"{shown}: {dotted(one.key)}", one.what, one.fix) for one in document.broken()
    ]
    if problems:
        raise CatalogError(problems)
