"""What an engine reads beside the tree: where it lies in the container, and how it is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spark_deploy.catalog.model import Model
from spark_deploy.catalog.profile import Profile
from spark_deploy.lockfile.types import Lock
from spark_deploy.planning.budget.beside import adapter_rank
from spark_deploy.planning.types import BesidePlan
from spark_deploy.planning.work.checkpoint import locked_source, source_plan
from spark_deploy.settings.types import Settings

DRAFTER_MOUNT = "/drafter"
ADAPTERS_MOUNT = "/adapters"


def beside_plans(
    model: Model, profile: Profile, settings: Settings, lock: Lock
) -> tuple[BesidePlan, ...]:
    """Return the repositories that are mounted beside the tree, the drafter's first."""
    drafts = profile.speculation
    wanted = [
        (f"{ADAPTERS_MOUNT}/{number}", one.repository, one.revision)
        for number, one in enumerate(model.adapters.values())
    ]
    if drafts and drafts.repository:
        wanted.insert(0, (DRAFTER_MOUNT, drafts.repository, drafts.revision))
    return tuple(
        BesidePlan(source_plan(locked_source(lock, repository, revision), settings), target)
        for target, repository, revision in wanted
    )


def drafts_told(profile: Profile) -> Mapping[str, Any] | None:
    """Return the engine's speculative configuration."""
    drafts = profile.speculation
    if drafts is None:
        return None
    told: dict[str, Any] = {"method": drafts.method, "num_speculative_tokens": drafts.tokens}
    if drafts.repository:
        told["model"] = DRAFTER_MOUNT
        if profile.engine_mode == "portable":
            # That format is for trees of ours; a drafter is as it was published.
            told["draft_load_config"] = {"load_format": "safetensors"}
    words = {"prompt_lookup_max": drafts.longest_match, "prompt_lookup_min": drafts.shortest_match}
    return {**told, **{name: count for name, count in words.items() if count is not None}}


def adapters_told(model: Model) -> dict[str, Any]:
    """Return the options for adapters; none without."""
    if not model.adapters:
        return {}
    modules = [f"{name}={ADAPTERS_MOUNT}/{number}" for number, name in enumerate(model.adapters)]
    return {
        "enable-lora": True,
        "max-loras": len(modules),
        "max-lora-rank": adapter_rank(model),
        "lora-modules": modules,
    }
