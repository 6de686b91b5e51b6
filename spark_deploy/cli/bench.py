"""``spark-deploy bench``: measure what hosts serve, through their gateways; compare results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
from spark_contract.documents import DocumentError, parse, plain, text_of
from spark_contract.release import Release
from spark_contract.units import MAIN_SERVICE

from spark_deploy.bench import benchy, host, markdown, page, submission, vllm_bench
from spark_deploy.bench.load import Endpoint
from spark_deploy.bench.page import measure
from spark_deploy.bench.result import Answer, BenchResult, Cell, Load, Published, Served
from spark_deploy.cli import ladder
from spark_deploy.cli.connect import connection_of, login_of
from spark_deploy.cli.hosts import Target, build_plan, chosen_services, select_hosts
from spark_deploy.cli.options import FILE, FOLDER, Options, service_option, shared_options
from spark_deploy.cli.terminal import note
from spark_deploy.config.errors import SparkError
from spark_deploy.ticking import ticking

_HOURS_TICK_S = 30.0  # of what may take hours
_NAME_FILES = "name files that `spark-deploy bench` wrote (DIR/HOST-TIME.json)"


_COUNT = click.IntRange(min=1)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What to measure, and how."""

    protocols: tuple[str, ...] = ()  # empty: all that are installed
    service: str | None = None
    depths: tuple[int, ...] = ()
    clients: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    runs: int | None = None
    book_url: str | None = None


@click.command
@click.option("--out", metavar="DIR", default="bench", type=FOLDER, help="Folder of results.")
@click.option(
    "--protocol",
    "protocols",
    multiple=True,
    help="Only this protocol; repeatable.",
    type=click.Choice(["seeds", "llama-benchy", "vllm-bench"]),
)
@service_option("This service instead of the main one.")
@click.option("--compare", multiple=True, metavar="FILE", type=FILE, help="Compare result files.")
@click.option(
    "--depths",
    multiple=True,
    type=click.IntRange(min=0),
    metavar="N",
    help="Context depth of llama-benchy; repeatable.",
)
@click.option(
    "--clients", multiple=True, type=_COUNT, metavar="N", help="Concurrent clients; repeatable."
)
@click.option("--pp", "prompt_tokens", type=_COUNT, metavar="N", help="Tokens per prompt.")
@click.option("--tg", "answer_tokens", type=_COUNT, metavar="N", help="Tokens per answer.")
@click.option("--runs", type=_COUNT, metavar="N", help="Runs per measurement.")
@click.option(
    "--ladder", "is_ladder", is_flag=True, help="Measure every published stage, then return."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask before a ladder.")
@click.option("--book-url", metavar="URL", help="Text for llama-benchy's prompts.")
@shared_options(plans=True)
def bench(
    options: Options, out: str, compare: Sequence[str], is_ladder: bool, **measurement: Any
) -> int:
    """Measure hosts one after the other, or compare files."""
    return measure_or_compare(
        options, Path(out), compare, Measurement(**measurement), is_ladder=is_ladder
    )


def measure_or_compare(
    options: Options, out: Path, compare: Sequence[str], how: Measurement, *, is_ladder: bool
) -> int:
    """Measure hosts one after the other, or compare files."""
    if compare:
        results = [_read(Path(name)) for name in compare]
        _tell(options, results, _written(results, out, "comparison"))
        return 0
    if is_ladder:
        code, results = ladder.climb(options, lambda host: _one(host, how, out)[0])
        if results:
            _tell(options, results, _written(results, out, "ladder"))
        return code
    results = []
    for one in select_hosts(options, judged=False):
        result, name = _one(one, how, out)
        results.append(result)
        text = _written([result], out, name)
        if not options.json:  # which is one document of all hosts
            print(text)
    if options.json:
        _tell(options, results, "")
    return 0


def _one(one: Target, how: Measurement, out: Path) -> tuple[BenchResult, str]:
    """Measure one host into a file of its own, and return the file's name."""
    began = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    name = f"{one.name.lstrip('@')}-{began.replace(':', '')}"
    out.mkdir(parents=True, exist_ok=True)
    result = measured(one, how, began, out / name)
    (out / f"{name}.json").write_text(text_of(result), encoding="utf-8")
    return result, name


def _written(results: Sequence[BenchResult], out: Path, name: str) -> str:
    """Write what people read of some results, and return it."""
    out.mkdir(parents=True, exist_ok=True)
    text = markdown.text_of(results)
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    (out / f"{name}.html").write_text(page.page_of(results), encoding="utf-8")
    note(f"written: {out / name}.md and .html")
    return text


def _tell(options: Options, results: Sequence[BenchResult], text: str) -> None:
    print(json.dumps(plain(results), indent=1) if options.json else text)


def _read(path: Path) -> BenchResult:
    try:
        return parse(BenchResult, path.read_text(encoding="utf-8"))
    except (OSError, DocumentError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise SparkError.one(str(path), f"is no result of a bench: {why}", _NAME_FILES) from error


def measured(one: Target, how: Measurement, began: str, files: Path) -> BenchResult:
    """Measure one host; what others take results in is written to files of this name."""
    service = chosen_services(one, how.service or MAIN_SERVICE)[0]
    connection, login = connection_of(one, service=service), login_of(one)
    served, release = host.served_by(login, service)
    key = login.told(f"cat {connection.key_path}").strip()
    notes: list[str] = []
    note(f"{one.name}: {served.model} with {served.profile} ({served.release})")
    raw = files.with_name(f"{files.name}.llama-benchy.json")
    with ExitStack() as held:
        url = connection.base_url
        if connection.tunnel:
            here = held.enter_context(host.tunnel(login, _port(one, service)))
            url = f"http://127.0.0.1:{here}/v1"
        endpoint = Endpoint(url, connection.model, key, connection.ca)
        bench = _Bench(how, login, release, endpoint, notes)
        samples = held.enter_context(host.sampled(login))
        before = host.drafts(login, service)
        answers = bench.seeds()
        benchy_version, cells = bench.grid(raw)
        vllm_version, loads = bench.loads(_port(one, service), connection.key_path)
        after = host.drafts(login, service)
    drafted, accepted = (max(0, b - a) for a, b in zip(before, after, strict=True))
    result = BenchResult(
        1, began, served, answers, cells, benchy_version, drafted, accepted, tuple(samples),
        tuple(notes), loads, vllm_version, _published(one, served),
    )  # fmt: skip
    _submit(one, release, result, files, raw)
    return result


def _published(one: Target, served: Served) -> tuple[Published, ...]:
    """Return what others published of one request of the same pair."""
    profile = one.catalog.profiles.get((served.profile, served.model))
    return tuple(
        Published(figure.tokens_per_s, figure.source)
        for figure in (profile.published if profile else ())
        if figure.tokens_per_s and figure.requests == 1 and figure.model == served.model
    )


def _port(one: Target, service: str) -> int:
    settings = one.settings.settings
    own = settings if service == MAIN_SERVICE else settings.of_service(service)
    return own.serve.port


def _submit(one: Target, release: Release, result: BenchResult, files: Path, raw: Path) -> None:
    """Write what Spark Arena and NVIDIA take, where figures of theirs were measured."""
    if not result.cells and not result.loads:
        return
    if why := result.served.no_spark:
        note(f"{one.name}: no folder for others. {why}")
        return
    try:
        plan = build_plan(one)
    except SparkError as error:
        note(f"{one.name}: no folder for others: {error.problems[0].line}")
        return
    mine = next((s for s in plan.served if s.serve.name == release.name), None)
    if mine is None:
        note(f"{one.name}: what serves is not what the settings say: no folder for others")
        return
    locked = mine.sources[0].locked
    origin = submission.Origin(locked.repo, locked.commit, built=mine.checkpoint is not None)
    found = json.loads(raw.read_text()) if result.cells else None
    folder = files.with_name(f"{files.name}.submission")
    submission.write(folder, result, release, origin, found)
    note(f"written: {folder}, for Spark Arena and others; nothing was sent")


@dataclass(frozen=True, slots=True)
class _Bench:
    """Who is measured, and by what."""

    how: Measurement
    login: host.Login
    release: Release
    endpoint: Endpoint
    notes: list[str]

    def wanted(self, protocol: str) -> bool:
        return not self.how.protocols or protocol in self.how.protocols

    @property
    def context_tokens(self) -> int:
        return self.release.check.max_model_len

    def left_out(self, what: str, fix: str) -> None:
        """Note it, or refuse where it was asked for.

        Raises:
            SparkError: it was asked for.
        """
        if self.how.protocols:
            raise SparkError.one(self.login.name, what, fix)
        self.notes.append(f"{what}; {fix}")

    def seeds(self) -> tuple[Answer, ...]:
        if not self.wanted("seeds"):
            return ()
        return tuple(measure(self.endpoint, self.context_tokens, note))

    def loads(self, port: int, key_path: str) -> tuple[str | None, tuple[Load, ...]]:
        if not self.wanted("vllm-bench"):
            return None, ()
        how = self.how
        sizes = {"prompt_tokens": how.prompt_tokens, "answer_tokens": how.answer_tokens}
        given = {name: value for name, value in sizes.items() if value}
        cases = list(vllm_bench.cases_of(how.clients, self.context_tokens, **given))
        found = vllm_bench.measure(self.login, self.release, port, key_path, cases, note)
        if found[0] is None:
            what = f"{self.release.image.tag} has no vllm bench serve"
            self.left_out(what, "choose another protocol, or another image")
        return found

    def grid(self, raw: Path) -> tuple[str | None, tuple[Cell, ...]]:
        if not self.wanted("llama-benchy"):
            return None, ()
        python = benchy.interpreter()
        if python is None:
            what = "llama-benchy is not installed on the machine that measures"
            self.left_out(what, "pipx install llama-benchy")
            return None, ()
        how, context_tokens = self.how, self.context_tokens
        whole = benchy.Grid(
            tuple(how.depths or benchy.DEPTHS),
            tuple(how.clients or benchy.CONCURRENCIES),
            how.runs or benchy.RUNS,
            how.prompt_tokens or benchy.PROMPT_TOKENS,
            how.answer_tokens or benchy.ANSWER_TOKENS,
        )
        grid = whole.fitting(context_tokens)
        if left := [depth for depth in whole.depths if depth not in grid.depths]:
            depths = ", ".join(map(str, left))
            self.notes.append(f"depths {depths} do not fit into {context_tokens} tokens of context")
        if not grid.depths:
            return None, ()
        note(f"llama-benchy: depths {grid.depths}, clients {grid.concurrencies}, {grid.runs} runs")
        more = ["--book-url", how.book_url] if how.book_url else []
        whole_run = ticking("llama-benchy", note, _HOURS_TICK_S)
        with host.tokenizer(self.login, self.release.tree.path) as folder, whole_run:
            return benchy.measure(python, self.endpoint, folder, grid, raw, more)
