"""The report as a file: Markdown for people, and the same as JSON inside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spark_deploy.catalog.questions import OpenQuestions
from spark_deploy.checkout import CHECKOUT
from spark_deploy.cli.looks.report.document import HostReport, Report, Serving
from spark_deploy.documents.declare import convert, typed
from spark_deploy.documents.files import load_schema
from spark_deploy.documents.schema_check import problems_of
from spark_deploy.errors import Problem, SparkError

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
