"""The report of a run: every field is chosen, so what nobody chose cannot be in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spark_deploy.documents.declare import later, needed

SPARK = "NVIDIA GB10"


@dataclass(frozen=True, slots=True)
class Checked:
    """One check of the server."""

    name: str = needed("Name of the check.")
    ok: bool = needed("Whether it was passed.")
    weight: str = needed("must, or warn for what ends nothing.")
    seconds: float = needed("How long it took.", minimum=0)
    detail: str = needed("What it found; empty for checks that quote what was said.")


@dataclass(frozen=True, slots=True)
class Told:
    """One event of the watch."""

    at: str = needed("When, UTC.")
    kind: str = needed("What it is about.")
    text: str = needed("A sentence; empty for kinds that name addresses.")


@dataclass(frozen=True, slots=True)
class Judged:
    """What preflight says against the host."""

    verdict: Literal["refused", "warned"] = needed("Whether a deploy would go on.")
    about: str = needed("The subject, in a word.")


@dataclass(frozen=True, slots=True)
class Work:
    """One job of the host."""

    kind: str = needed("fetch, build and so on.")
    state: str = needed("done: its proof is there.")
    elapsed_s: int | None = needed("How long it ran.")
    free_lost_bytes: int | None = later(None, "Of MemFree, from before its work to after it.")
    cached_grown_bytes: int | None = later(None, "Of Cached, from before its work to after it.")


@dataclass(frozen=True, slots=True)
class Serving:
    """The engine that runs."""

    model: str = needed("Name in the catalog.")
    profile: str = needed("Name in the catalog.")
    release: str = needed("Name of the release.")
    proven: bool = needed("Whether its proof covers what runs now.")
    level: str = needed("Level of the last check; empty: never checked.")
    checked_at: str = needed("When, UTC.")
    started_since: bool = needed("Whether it was started again since its full check.")
    portable: bool = needed("Whether the engine computes without quantised kernels.")
    restarts: int = needed("Of its unit, by systemd.", minimum=0)
    checks: tuple[Checked, ...] = needed("What the last check found.")
    kernels: tuple[str, ...] = needed("The engine's lines that name kernels and backends.")
    start_times_s: dict[str, float] = needed("Steps of the start, as the engine times them.")
    sizes_bytes: dict[str, int] = needed("As the engine counted them.")
    kv_cache_tokens: int | None = needed("As the engine counted them.")
    planned_kv_cache_tokens: int | None = needed("By its plan, counted as the engine counts.")
    planned_kv_cache_bytes: int | None = needed("By the plan of the same model and profile.")
    start_lowest_bytes: int | None = needed("Least memory available while it started.")
    start_floor_bytes: int | None = needed("Below it the start would have been ended.")
    drafted_tokens: int | None = needed("Since it started.")
    accepted_tokens: int | None = needed("Of them accepted.")
    generated_tokens: int | None = needed("Since it started.")
    speed: dict[str, float] = needed("Medians of the measurement kept with the proof.")
    rollout_state: str | None = needed("Of the rollout that brought it.")
    rollout_times_s: dict[str, float] = needed("Of its phases.")
    events: tuple[Told, ...] = needed("The last of the watch.")


@dataclass(frozen=True, slots=True)
class Answered:
    """What a host answers to an open question."""

    id: str = needed("Name of the question.")
    state: Literal["yes", "no", "open"] = needed("open: this host does not show it.")
    text: str = needed("What it shows.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """One host."""

    name: str = needed("A number; never the host's own name.", pattern="^host-[0-9]+$")
    local: bool = needed("Whether the host was asked as `@local`.")
    machine: dict[str, str] = needed("Product, firmware, system.")
    versions: dict[str, str] = needed("Of what is installed, and of what the engine holds.")
    stand_ins: tuple[str, ...] = needed("Of the virtual lab: with one it says nothing of a Spark.")
    memory_total_bytes: int = needed("Of the host.", minimum=0)
    memory_available_bytes: int = needed("When it was asked.", minimum=0)
    gpu: dict[str, float] = needed("Temperature and power when it was asked.")
    gpu_container: tuple[str, ...] = needed("With these a container saw the GPU.")
    kernel_log: dict[str, int] = needed("Lines of trouble since the boot, by kind.")
    foreign_containers: int = needed("Containers of others.", minimum=0)
    preflight: tuple[Judged, ...] = needed("What speaks against the host.")
    jobs: tuple[Work, ...] = needed("Slow work of ours.")
    notes: tuple[str, ...] = needed("What could not be told, and why.")
    serving: Serving | None = needed("Null: nothing runs.")
    answers: tuple[Answered, ...] = needed("To the questions that only a Spark can answer.")

    @property
    def is_spark(self) -> bool:
        """Whether what it shows counts for DGX Sparks."""
        return self.versions.get("gpu") == SPARK and not self.stand_ins


@dataclass(frozen=True, slots=True)
class Report:
    """What `spark-deploy report` found; redacted, made to be sent."""

    schema_version: Literal[1] = needed("Format of this file.")
    at: str = needed("When, UTC.")
    version: str = needed("Of this project.")
    hosts: tuple[HostReport, ...] = needed("One entry a host.", minItems=1)
