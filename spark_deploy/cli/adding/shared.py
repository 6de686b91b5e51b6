"""A pair that somebody else can serve: one file with model, profile, identities and proof.

``spark-deploy share`` writes it and ``spark-deploy add`` takes it. It holds what catalog files say
and nothing of hosts or settings, so no secret has a way into it; what looks like one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml
from spark_contract.host.digests import COMMIT

from spark_deploy.documents.declare import convert, needed, schema_of, setting, typed
from spark_deploy.documents.schema_check import dotted, problems_of
from spark_deploy.errors import CatalogError, Problem
from spark_deploy.settings.service.serving import CATALOG_NAME

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
