"""What a model, an engine and one host cannot do, whatever the memory: told with the numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from spark_deploy.catalog.model import Model
from spark_deploy.catalog.profile import Profile
from spark_deploy.errors import Problem
from spark_deploy.planning.budget.memory import context_tokens
from spark_deploy.settings.engine_options import meaning
from spark_deploy.settings.types import Settings

_VERSION = re.compile(r"v?(0\.\d+\.\d+)(?![\d.])")


def limit_problems(model: Model, profile: Profile) -> Iterator[Problem]:
    """Yield what of the effective profile the model or the engine refuses at its start."""
    most, wanted = model.architecture.max_context_tokens, context_tokens(model, profile)
    if wanted > most and not _stretched(meaning(profile.options)):
        what = f"{wanted:,} tokens are more than {model.name} was made for ({most:,})"
        fix = f"set engine.max_context_tokens to {most} or less, or leave it out"
        yield Problem("engine.max_context_tokens", what, fix)
    if profile.speculation and not model.architecture.mtp_layers:
        what = f"{model.name} has no MTP layer to draft with"
        fix = "set engine.drafts: 0, or choose a profile without drafts"
        yield Problem(f"profile {profile.name}", what, fix)
    limits = profile.limits
    if limits.max_sequences > limits.max_batched_tokens:
        what = (
            f"{limits.max_sequences} are more than the {limits.max_batched_tokens} tokens of one "
            f"step of profile {profile.name}"
        )
        fix = f"set engine.max_sequences to {limits.max_batched_tokens} or less"
        yield Problem("engine.max_sequences", what, fix)


def _stretched(options: Mapping[str, Any]) -> bool:
    """Whether options change how positions are counted, as for longer contexts."""
    return "rope" in str(options.get("hf-overrides", "")).lower()


def engine_problems(
    model: Model, profile: Profile, settings: Settings, engines: Collection[str]
) -> Iterator[Problem]:
    """Yield why our plugin cannot be laid on the image, as far as its tag tells a version.

    Other images are judged by the plugin's own check while its layer is built.
    """
    image = settings.images.get(model.image.role, "")
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    found = _VERSION.match(tag)
    if found and found[1] not in engines and profile.plugin and model.image.plugin:
        known = ", ".join(sorted(engines))
        what = f"{image} is engine {found[1]}, which the plugin does not know (known: {known})"
        fix = "name an image of one of these, or choose a profile without the plugin"
        yield Problem(f"images.{model.image.role}", what, fix)
