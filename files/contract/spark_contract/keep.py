"""What pruning must leave on a host: the controller writes it, ``spark-host prune`` reads it."""

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
