"""The report as a file: Markdown for people, and the same as JSON inside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spark_deploy.config.catalog.guard_rails import OpenQuestions
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.documents.declare import convert, later, needed, typed
from spark_deploy.config.documents.schema_check import problems_of
from spark_deploy.config.documents.yaml_files import load_schema
from spark_deploy.config.errors import Problem, SparkError

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


_BEGIN, _END = "```json", "```"
_MARK = {"yes": "yes", "no": "**no**", "open": "open"}


def file_of(report: Report, questions: OpenQuestions) -> str:
    """Return the text of the file."""
    return "\n".join(_lines(report, questions)) + "\n"


def read_report(path: Path, *, checkout: Path = CHECKOUT) -> Report:
    """Return the report that a file holds.

    Raises:
        SparkError: it holds none, or one of another form.
    """
    _, begun, rest = path.read_text("utf-8", errors="replace").partition(f"\n{_BEGIN}\n")
    text, ended, _ = rest.partition(f"\n{_END}")
    fix = "take the file as `spark-deploy report` wrote it"
    try:
        data = json.loads(text) if begun and ended else None
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise SparkError([Problem(path.name, "holds no JSON between its fences", fix)])
    schema = load_schema("report", checkout=checkout)
    if problems := list(problems_of(data, schema, lambda _: path.name)):
        raise SparkError(problems)
    return convert(Report, data)


def _lines(report: Report, questions: OpenQuestions) -> Iterator[str]:
    yield f"# Report of {report.at}, version {report.version}"
    yield ""
    yield (
        "Made by `spark-deploy report`. It holds no prompts, answers, keys, serial numbers, names "
        "of hosts or addresses; read it before you send it."
    )
    for host in report.hosts:
        yield from _host(host, questions)
    yield from ("", "## The same as JSON", "", _BEGIN)
    yield json.dumps(typed(report), indent=1, ensure_ascii=False)
    yield _END


def _host(host: HostReport, questions: OpenQuestions) -> Iterator[str]:
    yield from ("", f"## {host.name}", "")
    if host.stand_ins:
        yield from (
            f"**Stand-ins: {', '.join(host.stand_ins)}. This says nothing of a Spark.**",
            "",
        )
    yield from (f"- {note}" for note in host.notes)
    yield from ("", "| open question | here | |", "|---|---|---|")
    found = {one.id: one for one in host.answers}
    for question in questions.all:
        answer = found[question.id]
        yield f"| {question.question} | {_MARK[answer.state]} | {_cell(answer.text)} |"
    yield from _table("Machine", {**host.machine, **_memory(host)})
    yield from _table("Versions", host.versions)
    against = [f"{one.verdict}: {one.about}" for one in host.preflight]
    yield from ("", f"Preflight: {', '.join(against) or 'nothing against it'}.")
    if host.serving:
        yield from _serving(host.serving)


def _memory(host: HostReport) -> dict[str, str]:
    now = {name: f"{value:g}" for name, value in host.gpu.items()}
    log = {f"kernel log, {name}": str(count) for name, count in host.kernel_log.items()}
    total, available = _gib(host.memory_total_bytes), _gib(host.memory_available_bytes)
    return {"memory": f"{available} of {total} available", **now, **log}


def _serving(one: Serving) -> Iterator[str]:
    worth = "proven" if one.proven else "not proven"
    yield from ("", f"### {one.model} with {one.profile}: {worth}", "")
    yield from ("| check | | s | found |", "|---|---|---|---|")
    for check in one.checks:
        verdict = "ok" if check.ok else f"**{'failed' if check.weight == 'must' else 'warned'}**"
        yield f"| {check.name} | {verdict} | {check.seconds:.1f} | {_cell(check.detail)} |"
    sizes = {f"{name}, as counted": _gib(size) for name, size in one.sizes_bytes.items()}
    yield from _table("Memory", {
        **sizes,
        "KV cache, counted": _tokens(one.kv_cache_tokens),
        "KV cache, planned": _tokens(one.planned_kv_cache_tokens),
        "least while it started": _gib(one.start_lowest_bytes),
        "floor": _gib(one.start_floor_bytes),
    })  # fmt: skip
    times = {**one.start_times_s, **{f"rollout, {k}": v for k, v in one.rollout_times_s.items()}}
    yield from _table("Times", {name: f"{seconds:.1f} s" for name, seconds in times.items()})
    yield from _table("Speed", {name: f"{value:.4g}" for name, value in one.speed.items()})
    if one.kernels:
        yield from ("", "Kernels and backends, in the engine's words:", "")
        yield from (f"- `{line}`" for line in one.kernels)
    if one.events:
        yield from ("", "Events of the watch:", "")
        yield from (f"- {event.at} {event.kind} {event.text}".rstrip() for event in one.events)


def _table(title: str, rows: Mapping[str, Any]) -> Iterator[str]:
    if rows:
        yield from ("", f"| {title} | |", "|---|---|")
        yield from (f"| {_cell(name)} | {_cell(str(value))} |" for name, value in rows.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _gib(size_bytes: int | None) -> str:
    return "not known" if size_bytes is None else f"{size_bytes / (1 << 30):.1f} GiB"


def _tokens(count: int | None) -> str:
    return "not known" if count is None else f"{count:,} tokens"
