"""What a host shows of a running engine beyond its status: ``spark-host evidence``.

It is made to be sent to others, so it holds numbers, versions and the engine's own fixed words:
never what somebody asked or was answered, and nothing that tells one host from another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class EngineEvidence:
    """What one run of an engine said of itself, counted, and holds in memory."""

    release: str
    lines: tuple[str, ...] = ()  # in which it names kernels and backends
    times_s: dict[str, float] = field(default_factory=dict)  # of its start, by step
    sizes_bytes: dict[str, int] = field(default_factory=dict)  # as it counted them
    kv_cache_tokens: int | None = None
    libraries: dict[str, str] = field(default_factory=dict)  # in its processes, with versions
    drafted_tokens: int | None = None  # since it started
    accepted_tokens: int | None = None
    generated_tokens: int | None = None
    rollout_state: str | None = None  # of the rollout that brought it
    rollout_times_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of the host and of the engines that run there."""

    SCHEMA_VERSION: ClassVar[int] = 2

    firmware: dict[str, str]  # product, BIOS, parts that fwupd names
    gpu: dict[str, float]  # temperature and power now
    gpu_container: tuple[str, ...]  # arguments with which a container saw the GPU; () never did
    kernel_log: dict[str, int]  # how often it tells of trouble since the boot
    engines: tuple[EngineEvidence, ...]
