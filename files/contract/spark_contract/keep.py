"""What pruning must leave on a host, as the controller says it, and what ``prune`` answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keep:
    """All that the plan of a host uses, and where things lie that may go."""

    releases_kept: int  # ways back, beside those that serve or boot
    releases: frozenset[str]
    folders: frozenset[str]
    images: frozenset[str]
    models_dir: str
    sources_dir: str
    cache_dir: str


@dataclass(frozen=True, slots=True)
class Prunable:
    """One thing that goes, and what that gives back."""

    kind: str  # "release" | "tree" | "source" | "cache" | "image" | "job"
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Pruning:
    """What a prune removes, and why the rest stays."""

    items: tuple[Prunable, ...]
    bytes: int
    kept: dict[str, str]  # release -> why
    not_ours: tuple[str, ...]  # beside ours
    problems: tuple[str, ...]  # what could not be removed
