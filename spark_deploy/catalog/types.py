"""The catalog as frozen data: read once, then passed along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_deploy.catalog.model import Model
from spark_deploy.catalog.profile import Profile
from spark_deploy.catalog.rails import GuardRail
from spark_deploy.errors import CatalogError, Problem


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything there is to choose from, and the rules between it."""

    models: Mapping[str, Model]
    profiles: Mapping[tuple[str, str], Profile]  # (profile, model): as this model wants it
    rails: tuple[GuardRail, ...]
    # Files that cannot be used: they stop who names them, nobody else.
    broken: Mapping[str, tuple[Problem, ...]] = field(default_factory=dict)

    def model(self, name: str) -> Model:
        """Return a model by name, or raise ``CatalogError``."""
        if name not in self.models:
            self._refuse("models", name, tuple(self.models))
        return self.models[name]

    def profile(self, name: str, model: str) -> Profile:
        """Return a profile as one model wants it, or raise ``CatalogError``."""
        if (name, model) not in self.profiles:
            self._refuse("profiles", name, self.profile_names)
        return self.profiles[name, model]

    @property
    def profile_names(self) -> tuple[str, ...]:
        """Names of the profiles that some model can be served with, sorted."""
        return tuple(sorted({profile for profile, _ in self.profiles}))

    def _refuse(self, kind: str, name: str, known: tuple[str, ...]) -> None:
        shown = f"catalog/{kind}/{name}.yml"
        unknown = Problem(shown, "does not exist", f"known here: {', '.join(known)}")
        raise CatalogError(list(self.broken.get(shown, (unknown,))))
