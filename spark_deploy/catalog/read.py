"""Read all of ``catalog/`` at once."""

from __future__ import annotations

from pathlib import Path

from spark_deploy.catalog.load import Model, Profile, load_guard_rails, load_model, load_profile
from spark_deploy.catalog.types import Catalog
from spark_deploy.checkout import CHECKOUT, catalog_names
from spark_deploy.errors import CatalogError, Problem


def read_catalog(checkout: Path = CHECKOUT) -> Catalog:
    """Return every model, every profile as each model wants it, and the guard rails."""
    models: dict[str, Model] = {}
    profiles: dict[tuple[str, str], Profile] = {}
    broken: dict[str, tuple[Problem, ...]] = {}
    for name in catalog_names("models", checkout=checkout):
        try:
            models[name] = load_model(name, checkout=checkout)
        except CatalogError as error:
            broken[f"catalog/models/{name}.yml"] = tuple(error.problems)
    for name in catalog_names("profiles", checkout=checkout):
        for model in models:
            try:
                profiles[name, model] = load_profile(name, model, checkout=checkout)
            except CatalogError as error:
                broken[f"catalog/profiles/{name}.yml"] = tuple(error.problems)
    return Catalog(models, profiles, load_guard_rails(checkout=checkout), broken)
