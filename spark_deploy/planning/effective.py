"""A profile as one host serves it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from spark_deploy.catalog.beside import Speculation
from spark_deploy.catalog.profile import Profile
from spark_deploy.settings.engine.arguments import KvCache, Limits
from spark_deploy.settings.types import Settings

_Part = TypeVar("_Part", Profile, Limits, KvCache)
# Of a host that drafts although its profile does not: a drafter without weights gets almost none.
_ACCEPTANCE_FLOOR = 0.5


def effective_profile(profile: Profile, settings: Settings) -> Profile:
    """Return the profile with the ``engine`` and ``checkpoint`` settings of the host put in."""
    engine = {
        field.name: getattr(settings.engine, field.name)
        for field in dataclasses.fields(settings.engine)
    }
    if settings.checkpoint.prebuilt and profile.shared_experts == "fp8-donor":
        profile = dataclasses.replace(profile, shared_experts="fp8-base")
    if settings.engine.drafts is not None:
        profile = with_drafts(profile, settings.engine.drafts)
    return dataclasses.replace(
        _put_in(profile, engine),
        limits=_put_in(profile.limits, engine),
        kv_cache=_put_in(profile.kv_cache, {"size_bytes": settings.engine.kv_cache_bytes}),
        layout=settings.checkpoint.layout or profile.layout,
    )


def with_drafts(profile: Profile, tokens: int) -> Profile:
    """Return the profile with so many drafts, and what its proof then demands."""
    if not tokens:
        return dataclasses.replace(profile, speculation=None)
    drafts = profile.speculation or Speculation(method="mtp", tokens=tokens)
    floor = profile.check.acceptance_floor or _ACCEPTANCE_FLOOR
    return dataclasses.replace(
        profile,
        speculation=dataclasses.replace(drafts, tokens=tokens),
        check=dataclasses.replace(profile.check, acceptance_floor=floor),
    )


def _put_in(part: _Part, chosen: Mapping[str, Any]) -> _Part:
    """Return a part with what is chosen for fields of its own; mappings are merged, null keeps."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value, kept = chosen.get(field.name), getattr(part, field.name)
        changed[field.name] = {**kept, **value} if isinstance(value, dict) else value
    return dataclasses.replace(part, **{k: v for k, v in changed.items() if v is not None})
