"""Read ``catalog/``: models, profiles with the changes for each model, guard rails."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ValidationError

from spark_deploy.config.catalog.guard_rails import GuardRails, OpenQuestions, all_hold
from spark_deploy.config.catalog.model import HybridModel, Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.catalog.types import Catalog, Engines, Families, LazyMapping
from spark_deploy.config.checkout import CHECKOUT, catalog_files, load_schema, read_mapping
from spark_deploy.config.documents import CHECK_VIOLATIONS, Schema, convert, violations
from spark_deploy.config.errors import CatalogError, Problem
from spark_deploy.config.schema_errors import dotted, schema_problems
from spark_deploy.config.settings.load import merge

_Data = dict[str, Any]
_Document = TypeVar(
    "_Document", HybridModel, PlainModel, Profile, GuardRails, Engines, Families, OpenQuestions
)
_CheckedProfile = Annotated[Profile, CHECK_VIOLATIONS]
_CheckedPlain = Annotated[PlainModel, CHECK_VIOLATIONS]
_CheckedHybrid = Annotated[HybridModel, CHECK_VIOLATIONS]
# These keys describe only the profile that contains them.
_NOT_INHERITED = ("summary", "choose_when", "published", "stage", "only_compared", "proven")


def read_catalog(checkout: Path = CHECKOUT, *, user_dir: Path | None = None) -> Catalog:
    """Return the catalog. Files are read on first use, so a mistake in one affects no other.

    ``user_dir`` contains the user's ``catalog/``, whose files replace shipped files.
    """
    files = _CatalogFiles.find(checkout, user_dir)
    paths = files.paths
    profile_schema = load_schema("profile", checkout=checkout)
    broken: dict[tuple[str, ...], tuple[Problem, ...]] = {}

    def read_model(name: str) -> Model | None:
        if name not in paths["models"]:
            return None
        with _collecting_problems(broken, f"models/{name}"):
            return _read_model(name, files)

    def read_profile(name: str) -> tuple[Profile, _Data] | None:
        if name not in paths["profiles"]:
            return None
        with _collecting_problems(broken, f"profiles/{name}"):
            data = files.merged("profiles", name, excluded_keys=_NOT_INHERITED)
            label = f"catalog/profiles/{name}.yml"
            profile = _validate(_CheckedProfile, data, profile_schema, label, name=name)
            return profile, data

    def profile_for_model(key: tuple[str, str]) -> Profile | None:
        profile_name, model_name = key
        if profile_name not in profiles or model_name not in models:
            return None
        profile, data = profiles[profile_name]
        with _collecting_problems(broken, *key):
            return _apply_model_changes(models[model_name], profile, data, profile_schema)

    models: Mapping[str, Model] = LazyMapping(paths["models"], read_model)
    profiles = LazyMapping(paths["profiles"], read_profile)
    keys = [(profile, model) for profile in paths["profiles"] for model in paths["models"]]
    for_models = LazyMapping(keys, profile_for_model)
    rails = _read_shipped(GuardRails, "guard_rails", checkout).rails
    engines = _read_shipped(Engines, "engines", checkout)
    return Catalog(models, for_models, rails, engines, broken, files.replaced)


@contextmanager
def _collecting_problems(
    broken: dict[tuple[str, ...], tuple[Problem, ...]], *key: str
) -> Iterator[None]:
    """Record the problems of a CatalogError under ``key`` instead of raising it."""
    try:
        yield
    except CatalogError as error:
        broken[key] = error.problems


@dataclass(frozen=True, slots=True)
class _CatalogFiles:
    checkout: Path
    paths: Mapping[str, Mapping[str, Path]]  # by kind and name

    @classmethod
    def find(cls, checkout: Path, user_dir: Path | None) -> "_CatalogFiles":
        kinds = ("models", "profiles")
        paths = {kind: catalog_files(kind, checkout=checkout, user_dir=user_dir) for kind in kinds}
        return cls(checkout, paths)

    @property
    def replaced(self) -> frozenset[str]:
        return frozenset(
            f"{kind}/{name}"
            for kind, paths in self.paths.items()
            for name, shipped in catalog_files(kind, checkout=self.checkout).items()
            if paths[name] != shipped and not _is_copy(paths[name], shipped)
        )

    def merged(self, kind: str, name: str, excluded_keys: tuple[str, ...] = ()) -> _Data:
        """Return a file merged over its ``based_on`` file, except that file's ``excluded_keys``."""
        label = f"catalog/{kind}/{name}.yml"
        data = self._read(kind, name)
        parent = data.pop("based_on", None)
        if parent is None:
            return data
        # A user's file may be based on the shipped file that it replaces.
        base = self._read(kind, parent, shipped=parent == name)
        if "based_on" in base:
            message = f"the base {parent} is itself based on another file"
            raise CatalogError.single(label, message, f"base it on {base['based_on']} directly")
        inherited = {key: value for key, value in base.items() if key not in excluded_keys}
        return merge(inherited, data, keep_on_null=False)

    def _read(self, kind: str, name: object, *, shipped: bool = False) -> _Data:
        """Read a file; ``shipped`` ignores a user's file of the same name."""
        label = f"catalog/{kind}/{name}.yml"
        shipped_path = self.checkout / label
        path = shipped_path if shipped else self.paths[kind].get(str(name), shipped_path)
        data, problems = read_mapping(path, label=label)
        if problems:
            raise CatalogError(problems)
        return data


def _is_copy(path: Path, shipped: Path) -> bool:
    try:
        return path.read_bytes() == shipped.read_bytes()
    except OSError:  # reported if this file is used
        return False


def read_file(kind: str, name: str, *, user_dir: Path) -> _Data:
    """Return a model or profile merged with ``based_on``."""
    excluded_keys = _NOT_INHERITED if kind == "profiles" else ()
    return _CatalogFiles.find(CHECKOUT, user_dir).merged(kind, name, excluded_keys=excluded_keys)


def read_questions(checkout: Path = CHECKOUT) -> OpenQuestions:
    return _read_shipped(OpenQuestions, "open_questions", checkout)


def read_families() -> Families:
    return _read_shipped(Families, "families", CHECKOUT)


def _read_model(name: str, files: _CatalogFiles) -> Model:
    label = f"catalog/models/{name}.yml"
    data = files.merged("models", name)
    model: Model
    if data.get("kind") == "plain":
        schema = load_schema("plain_model", checkout=files.checkout)
        model = _validate(_CheckedPlain, data, schema, label, name=name)
    else:
        schema = load_schema("model", checkout=files.checkout)
        model = _validate(_CheckedHybrid, data, schema, label, name=name)
    if model.fixed_template is None:
        return model
    text = _read_template(model.fixed_template, files.checkout, f"{label}: fixed_template")
    return dataclasses.replace(model, fixed_template_text=text)


def _read_template(name: str, checkout: Path, label: str) -> str:
    folder = checkout / "catalog/templates"
    try:
        return (folder / f"{name}.jinja").read_text(encoding="utf-8")
    except FileNotFoundError as error:
        known = ", ".join(sorted(path.stem for path in folder.glob("*.jinja")))
        message = f"catalog/templates/{name}.jinja does not exist"
        raise CatalogError.single(label, message, f"known here: {known}") from error


def _apply_model_changes(model: Model, profile: Profile, data: _Data, schema: Schema) -> Profile:
    """Return a profile with the model's changes, selected by the unchanged profile's traits."""
    changes = [change.set for change in model.changes if all_hold(change.when, profile.traits)]
    for change in changes:
        data = merge(data, change, keep_on_null=False)
    if changes:
        label = f"catalog/models/{model.name}.yml: changes of profile {profile.name}"
        profile = _validate(_CheckedProfile, data, schema, label, name=profile.name)
    return dataclasses.replace(profile, engine_mode=model.image.engine_mode)


def _read_shipped(kind: type[_Document], name: str, checkout: Path) -> _Document:
    label = f"catalog/{name}.yml"
    data, problems = read_mapping(checkout / label, label=label)
    if problems:
        raise CatalogError(problems)
    return _validate(kind, data, load_schema(name, checkout=checkout), label)


def _validate(
    kind: type[_Document], data: _Data, schema: Schema, label: str, **more_fields: str
) -> _Document:
    if problems := list(schema_problems(data, schema, lambda path: label)):
        raise CatalogError(problems)
    try:
        return convert(kind, {**data, **more_fields})
    except ValidationError as error:
        problems = [
            Problem(f"{label}: {dotted(violation.key)}", violation.what, violation.fix)
            for violation in violations(error)
        ]
        raise CatalogError(problems) from error
