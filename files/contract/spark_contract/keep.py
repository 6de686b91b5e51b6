"""What pruning must leave on a host, and what an uninstall takes: controllers ask, hosts answer."""

from __future__ import annotations

from dataclasses import dataclass, field


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


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the settings of a host would make there, and how much of it shall go."""

    models_dir: str
    sources_dir: str
    cache_dir: str
    files: tuple[str, ...]  # ours alone, wherever they lie
    shared_files: tuple[str, ...]  # somebody may have had them before
    daemon_json: str
    daemon_keys: tuple[str, ...]  # keys in it that are ours
    masked: tuple[str, ...]
    packages: tuple[str, ...]
    engine_packages: tuple[str, ...]  # Docker
    gpu_packages: tuple[str, ...]  # the NVIDIA toolkit, CUDA
    docker_users: tuple[str, ...]
    access_files: tuple[str, ...]  # how this project logs in
    models: bool  # trees and sources go, too
    engine: bool  # what was installed of Docker and CUDA goes, too


@dataclass(frozen=True, slots=True)
class Before:
    """A host as it was before the first deploy changed it."""

    at: str
    packages: tuple[str, ...]
    groups: tuple[str, ...]
    masked: tuple[str, ...]
    boot_target: str
    docker_members: tuple[str, ...]
    images: tuple[str, ...]  # ids
    directories: tuple[str, ...]  # of those that a deploy, or a package of it, may make
    files: dict[str, str | None] = field(default_factory=dict)  # of `shared_files`


@dataclass(frozen=True, slots=True)
class Thing:
    """One thing of ours on a host; with ``stays`` it is left there, for that reason."""

    kind: str
    name: str
    size_bytes: int = 0
    stays: str = ""


@dataclass(frozen=True, slots=True)
class Ours:
    """Everything of ours on a host, in the order in which it goes."""

    noted_at: str | None  # when `Before` was written; None: nobody did
    things: tuple[Thing, ...]
    problems: tuple[str, ...] = ()  # what could not be removed
