"""The catalog as frozen data: read once, then passed along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from spark_deploy.catalog.anatomy import Anatomy
from spark_deploy.catalog.engines import Engines
from spark_deploy.catalog.model import Model, PlainModel
from spark_deploy.catalog.profile import Profile
from spark_deploy.catalog.rails import GuardRail
from spark_deploy.errors import CatalogError, Problem


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything there is to choose from, and the rules between it."""

    models: Mapping[str, Model]
    profiles: Mapping[tuple[str, str], Profile]  # (profile, model): as this model wants it
    rails: tuple[GuardRail, ...]
    engines: Engines
    # What cannot be used stops who names it, nobody else: by file, or by profile and model.
    broken: Mapping[tuple[str, ...], tuple[Problem, ...]] = field(default_factory=dict)
    # Files of ours, as models/NAME, that files beside the inventory stand for.
    replaced: frozenset[str] = frozenset()

    def model(self, name: str) -> Model:
        """Return a model by name, or raise ``CatalogError``."""
        if name not in self.models:
            self._refuse("models", name, tuple(self.models), (f"models/{name}",))
        return self.models[name]

    def notes(self, model: str, profile: str) -> tuple[str, ...]:
        """Return what somebody should know who reads the plan of a pair."""
        named = (f"models/{model}", f"profiles/{profile}")
        return tuple(
            f"catalog/{one}.yml beside the inventory is used instead of ours"
            for one in named
            if one in self.replaced
        )

    def profile(self, name: str, model: str) -> Profile:
        """Return a profile as one model wants it, or raise ``CatalogError``."""
        wanted = (name, self.model(model).name)
        if wanted not in self.profiles:
            self._refuse("profiles", name, self.profile_names, (f"profiles/{name}",), wanted)
        return self.profiles[wanted]

    def knowing(self, anatomies: Mapping[str, Anatomy]) -> Catalog:
        """Return the catalog with what was read of models, drafters and adapters."""
        models = {name: _known(model, anatomies) for name, model in self.models.items()}
        profiles = {
            pair: replace(
                one,
                speculation=replace(
                    one.speculation, anatomy=anatomies.get(one.speculation.repository)
                ),
            )
            if one.speculation and one.speculation.repository
            else one
            for pair, one in self.profiles.items()
        }
        return replace(self, models=models, profiles=profiles)

    @property
    def profile_names(self) -> tuple[str, ...]:
        """Names of the profiles that some model can be served with, sorted."""
        return tuple(sorted({profile for profile, _ in self.profiles}))

    def _refuse(
        self, kind: str, name: str, known: tuple[str, ...], *reasons: tuple[str, ...]
    ) -> None:
        said = [problem for reason in reasons for problem in self.broken.get(reason, ())]
        fix = f"known here: {', '.join(known)}"
        raise CatalogError(said or [Problem(f"catalog/{kind}/{name}.yml", "does not exist", fix)])


def _known(model: Model, anatomies: Mapping[str, Anatomy]) -> Model:
    adapters = {
        name: replace(one, anatomy=anatomies.get(one.repository))
        for name, one in model.adapters.items()
    }
    model = replace(model, adapters=adapters)
    if isinstance(model, PlainModel):
        return replace(model, anatomy=anatomies.get(model.repository))
    return model
