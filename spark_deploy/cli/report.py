"""``doctor --report``: one redacted JSON file about hosts, made to be sent to others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from spark_contract import files

from spark_deploy.config.errors import Problem, SparkError

GB10 = "NVIDIA GB10"
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A check of the server."""

    name: str
    ok: bool
    weight: str  # must, or warn
    seconds: Annotated[float, Field(ge=0)]
    detail: str  # empty for checks that quote prompts or answers


@dataclass(frozen=True, slots=True)
class WatchdogEvent:
    """An event that the watchdog recorded."""

    at: str  # UTC
    kind: str
    text: str  # empty for kinds that may name addresses


@dataclass(frozen=True, slots=True)
class JobState:
    """A job of the host, and how the kernel's memory changed while it ran."""

    kind: str
    state: str
    elapsed_s: int | None
    free_lost_bytes: int | None = None  # MemFree
    cached_grown_bytes: int | None = None  # Cached


@dataclass(frozen=True, slots=True)
class Serving:
    """The release that runs, and its engine."""

    model: str
    profile: str
    release: str
    proven: bool
    level: str  # of the last check; empty: never checked
    checked_at: str  # UTC
    restarted_since_full_check: bool
    portable: bool
    restarts: Count
    checks: tuple[CheckResult, ...]
    kernels: tuple[str, ...]  # the engine's log lines that name kernels and backends
    start_times_s: dict[str, float]
    sizes_bytes: dict[str, int]
    kv_cache_tokens: int | None
    planned_kv_cache_tokens: int | None
    planned_kv_cache_bytes: int | None
    start_lowest_bytes: int | None  # least memory available during the start
    start_floor_bytes: int | None  # the start would have been stopped below it
    drafted_tokens: int | None
    accepted_tokens: int | None
    generated_tokens: int | None
    speed: dict[str, float]  # medians of the benchmark stored with the proof
    rollout_state: str | None
    rollout_times_s: dict[str, float]
    events: tuple[WatchdogEvent, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The host's answer to an open question."""

    id: str
    state: Literal["yes", "no", "open"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """The report of one host."""

    name: Annotated[str, Field(pattern="^host-[0-9]+$")]  # never the host's own name
    local: bool
    machine: dict[str, str]
    versions: dict[str, str]
    stand_ins: tuple[str, ...]  # packages of the virtual lab
    memory_total_bytes: Count
    memory_available_bytes: Count
    gpu: dict[str, float]
    gpu_container: tuple[str, ...]  # the options with which a container saw the GPU
    kernel_log: dict[str, int]  # lines since the boot, by kind
    unmanaged_containers: Count
    refusals: tuple[str, ...]  # subjects of preflight's refusals
    warnings: tuple[str, ...]
    jobs: tuple[JobState, ...]
    notes: tuple[str, ...]
    serving: Serving | None
    answers: tuple[Answer, ...]

    @property
    def is_spark(self) -> bool:
        """Whether its figures count for DGX Sparks."""
        return self.versions.get("gpu") == GB10 and not self.stand_ins


@dataclass(frozen=True, slots=True)
class Report:
    """The file."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    schema_version: Literal[1]
    at: str  # UTC
    version: str
    hosts: Annotated[tuple[HostReport, ...], Field(min_length=1)]


_REPORT = TypeAdapter(Report)


def read_report(path: Path) -> Report:
    """Return the report in a file.

    Raises:
        SparkError: the file is not a report.
    """
    fix = "take the file as `spark-deploy doctor --report` wrote it"
    try:
        return _REPORT.validate_json(path.read_bytes())
    except ValidationError as error:
        raise SparkError([
            Problem(f"{path.name}: {'.'.join(map(str, problem['loc']))}", problem["msg"], fix)
            for problem in error.errors(include_url=False, include_input=False)
        ]) from error  # fmt: skip


def plain_data(report: Report) -> dict[str, Any]:
    """Return a report as its file holds it."""
    return dict(_REPORT.dump_python(report, mode="json"))


def file_text(report: Report) -> str:
    """Return the content of a report's file."""
    return json.dumps(plain_data(report), indent=1, ensure_ascii=False) + "\n"


def write_report(hosts: tuple[HostReport, ...], path: Path | None) -> tuple[Report, Path]:
    """Write the file; without a path into the working directory, named after the time."""
    at = datetime.now(timezone.utc)
    report = Report(1, at.strftime("%Y-%m-%dT%H:%M:%SZ"), _version(), hosts)
    path = path or Path(f"spark-report-{at:%Y%m%d-%H%M%S}.json")
    files.write_text(path, file_text(report))
    return report, path


def _version() -> str:
    try:
        return version("dgx-spark-deploy")
    except PackageNotFoundError:
        return "unknown (not installed)"
