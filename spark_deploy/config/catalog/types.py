"""The catalog as frozen data, which is read once and then passed around."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from spark_deploy.config.catalog.architecture import RepoMetadata
from spark_deploy.config.catalog.guard_rails import GuardRail
from spark_deploy.config.catalog.model import Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.documents import CLOSED
from spark_deploy.config.errors import CatalogError, Problem

ENGINE_NAME = "vLLM"
_VERSION = re.compile(r"v?(0\.\d+\.\d+)(?![\d.])")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Engine:
    """A version of the engine."""

    source: str = Field(description="Wheel, and the file in it that lists these names.")
    generates: tuple[str, ...] = Field(description="Architectures that answer with text.")
    pools: tuple[str, ...] = Field(description="Architectures that answer with numbers.")
    tool_call: tuple[str, ...] = Field(description="Tool call parsers.")
    reasoning: tuple[str, ...] = Field(description="Reasoning parsers.")

    def supports(self, architecture: str) -> bool:
        return architecture in self.generates or architecture in self.pools


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Engines:
    """Architectures and parsers of each supported engine; a test writes them from the sources."""

    engines: dict[str, Engine] = Field(description="By version.")

    def for_image(self, reference: str) -> tuple[str, Engine | None]:
        version = version_of(reference)
        return version, self.engines.get(version)


def version_of(reference: str) -> str:
    """Return the vLLM version in an image's tag; "" if the tag is not a version."""
    without_digest, _, _ = reference.partition("@")
    _, _, name = without_digest.rpartition("/")
    _, _, tag = name.partition(":")
    version = _VERSION.match(tag)
    return version[1] if version else ""


_K = TypeVar("_K")
_V = TypeVar("_V")


class LazyMapping(Mapping[_K, _V]):
    """Documents that are read on first use; invalid documents are missing."""

    def __init__(self, keys: Iterable[_K], read: Callable[[_K], _V | None]):
        self._keys = keys
        self._read = read
        self._values: dict[_K, _V | None] = {}

    def __getitem__(self, key: _K) -> _V:
        if key not in self._values:
            self._values[key] = self._read(key)
        value = self._values[key]
        if value is None:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[_K]:
        return (key for key in self._keys if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclasses.dataclass(frozen=True, slots=True)
class Catalog:
    """Models, profiles, guard rails and engines."""

    models: Mapping[str, Model]
    profiles: Mapping[tuple[str, str], Profile]  # (profile, model): with the model's changes
    rails: tuple[GuardRail, ...]
    engines: Engines
    # Mistakes in files; they affect only these names.
    broken: Mapping[tuple[str, ...], tuple[Problem, ...]] = field(default_factory=dict)
    # Shipped files, as models/NAME, that the user's files replace.
    replaced: frozenset[str] = frozenset()

    def model(self, name: str) -> Model:
        if name not in self.models:
            self._raise_missing("models", name, tuple(self.models), (f"models/{name}",))
        return self.models[name]

    def notes(self, model: str, profile: str) -> tuple[str, ...]:
        """Return notes about the user's files that replace shipped files."""
        return tuple(
            f"catalog/{entry}.yml in your folder replaces the shipped file"
            for entry in (f"models/{model}", f"profiles/{profile}")
            if entry in self.replaced
        )

    def profile(self, name: str, model: str) -> Profile:
        key = (name, self.model(model).name)
        if key not in self.profiles:
            self._raise_missing("profiles", name, self.profile_names, (f"profiles/{name}",), key)
        return self.profiles[key]

    def with_repo_metadata(self, repo_metadata: Mapping[str, RepoMetadata]) -> "Catalog":
        """Return the catalog with the facts that the lock contains about each repository."""

        def read_model(name: str) -> Model | None:
            model = self.models.get(name)
            return _model_with_metadata(model, repo_metadata) if model else None

        def read_profile(key: tuple[str, str]) -> Profile | None:
            profile = self.profiles.get(key)
            speculation = profile and profile.speculation
            if not profile or not speculation or not speculation.repository:
                return profile
            metadata = repo_metadata.get(speculation.repository)
            return replace(profile, speculation=replace(speculation, metadata=metadata))

        models: Mapping[str, Model] = LazyMapping(self.models, read_model)
        return replace(self, models=models, profiles=LazyMapping(self.profiles, read_profile))

    def problems(self, *files: str) -> list[Problem]:
        """Read all files; return the mistakes in these files or, without arguments, in all."""
        len(self.models), len(self.profiles)
        broken = self.broken.items()
        return [p for (name, *_), found in broken if not files or name in files for p in found]

    @property
    def profile_names(self) -> tuple[str, ...]:
        return tuple(sorted({profile for profile, _ in self.profiles}))

    def _raise_missing(
        self, kind: str, name: str, known: tuple[str, ...], *keys: tuple[str, ...]
    ) -> None:
        """Raise the problems in ``broken`` under ``keys``, or else that the file is missing."""
        problems = [problem for key in keys for problem in self.broken.get(key, ())]
        suggested = (other for other in known if not other.startswith("lab-"))
        fix = f"known here: {', '.join(suggested)}"
        raise CatalogError(
            problems or [Problem(f"catalog/{kind}/{name}.yml", "does not exist", fix)]
        )


def _model_with_metadata(model: Model, repo_metadata: Mapping[str, RepoMetadata]) -> Model:
    adapters = {
        name: replace(entry, metadata=repo_metadata.get(entry.repository))
        for name, entry in model.adapters.items()
    }
    model = replace(model, adapters=adapters)
    if isinstance(model, PlainModel):
        return replace(model, metadata=repo_metadata.get(model.repository))
    return model


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Family:
    """Parser names for a model family."""

    model_types: tuple[str, ...] = Field(min_length=1, description="model_type of config.json.")
    name: str = ""
    """Regular expression for the repository's name; empty matches all."""
    reasoning: str | None = None
    """Reasoning parser of the engine; null for none."""
    tool_call: str | None = None
    """Tool call parser of the engine; null for none."""
    source: str = Field(min_length=1, description="Source of this knowledge.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Families:
    """Model families; the first match counts."""

    families: tuple[Family, ...] = Field(description="The first match counts.")

    def find(self, model_type: str, repository: str) -> Family | None:
        for family in self.families:
            if model_type in family.model_types and re.search(family.name, repository):
                return family
        return None
