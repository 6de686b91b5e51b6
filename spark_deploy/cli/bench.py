"""``spark-deploy bench``: measure servers through their gateways; compare results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from spark_deploy.cli import run_pyinfra
from spark_deploy.cli.connect import connection_of, login_of
from spark_deploy.cli.hosts import Target, build_plan, chosen_services, select_hosts
from spark_deploy.cli.options import FILE, FOLDER, Options, service_option, shared_options
from spark_deploy.cli.terminal import note
from spark_deploy.config.errors import SparkError
from spark_deploy.ticking import ticking

_TICK_S = 30.0  # between notes; a run takes hours
_COUNT = click.IntRange(min=1)
_DEPTH = click.IntRange(min=0)
_PROTOCOL = click.Choice(["seeds", "llama-benchy", "vllm-bench"])


@dataclass(frozen=True, slots=True)
class Measurement:
    protocols: tuple[str, ...] = ()  # empty: all that are installed
    service: str | None = None
    depths: tuple[int, ...] = ()
    clients: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    runs: int | None = None
    book_url: str | None = None


def _many(name: str, *names: str, **more: Any) -> Callable[..., Any]:
    return click.option(name, *names, multiple=True, **more)


@click.command
@click.option("--out", metavar="DIR", default="bench", type=FOLDER, help="Folder of results.")
@_many("--protocol", "protocols", type=_PROTOCOL, help="Only this protocol; repeatable.")
@service_option("This service instead of the main service.")
@_many("--compare", metavar="FILE", type=FILE, help="Compare result files.")
@_many("--depths", type=_DEPTH, metavar="N", help="Context depth of llama-benchy; repeatable.")
@_many("--clients", type=_COUNT, metavar="N", help="Concurrent clients; repeatable.")
@click.option("--pp", "prompt_tokens", type=_COUNT, metavar="N", help="Tokens per prompt.")
@click.option("--tg", "answer_tokens", type=_COUNT, metavar="N", help="Tokens per answer.")
@click.option("--runs", type=_COUNT, metavar="N", help="Runs per measurement.")
@click.option("--ladder", is_flag=True, help="Measure every published stage, then return.")
@click.option("-y", "--yes", is_flag=True, help="Skip the confirmation of a ladder.")
@click.option("--book-url", metavar="URL", help="Text for llama-benchy's prompts.")
@shared_options(plans=True)
def bench(
    options: Options, out: str, compare: Sequence[str], ladder: bool, **measurement: Any
) -> int:
    how = Measurement(**measurement)
    return measure_or_compare(options, Path(out), compare, how, ladder=ladder)


def measure_or_compare(
    options: Options, out: Path, compare: Sequence[str], how: Measurement, *, ladder: bool
) -> int:
    if compare:
        results = [_read(Path(name)) for name in compare]
        _print(options, results, _write(results, out, "comparison"))
        return 0
    if ladder:
        code, results = climb(options, lambda target: _measure_host(target, how, out)[0])
        if results:
            _print(options, results, _write(results, out, "ladder"))
        return code
    results = []
    for target in select_hosts(options, judged=False):
        result, name = _measure_host(target, how, out)
        results.append(result)
        text = _write([result], out, name)
        if not options.json:
            print(text)
    if options.json:
        _print(options, results, "")
    return 0


def stages_of(target: Target) -> list[str]:
    """Return the profiles that are stages of the host's model, in order.

    Raises:
        SparkError: there is none.
    """
    model = target.settings.settings.model
    stages = {
        profile.stage: name
        for (name, of), profile in target.catalog.profiles.items()
        if of == model and profile.stage
    }
    if not stages:
        fix = "add a `stage` to profiles in catalog/"
        raise SparkError.one(target.name, f"no profile is a stage of {model}", fix)
    return [stages[stage] for stage in sorted(stages)]


def climb(
    options: Options, measure_host: Callable[[Target], BenchResult]
) -> tuple[int, list[BenchResult]]:
    """Serve and measure each stage, then serve the settings again.

    Returns:
        An exit code and the results up to a failure.

    Raises:
        SparkError: a stage does not fit, or no confirmation; before any change.
    """
    hosts = select_hosts(options)
    names = [target.name for target in hosts]
    steps = [replace(options, profile=stage) for stage in stages_of(hosts[0])]
    for step in steps:
        for target in select_hosts(step):
            build_plan(target)
    stages = ", ".join(str(step.profile) for step in steps)
    run_pyinfra.agreed(
        options.yes,
        f"{', '.join(names)}: serve {stages} in turn, then the settings again? "
        "Clients get 503 during each change.",
    )
    results: list[BenchResult] = []
    try:
        for step in steps:
            if code := _deploy(step, names):
                note(f"{step.profile} does not serve: stopping here")
                return code, results
            results += [measure_host(target) for target in select_hosts(step)]
    finally:
        note("serving the settings again")
        code_after = _deploy(options, names)
    return code_after, results


def _deploy(options: Options, names: Sequence[str]) -> int:
    run_pyinfra.show(run_pyinfra.line("up", options, names, ["-y"]))
    return run_pyinfra.deploy("up", select_hosts(options), options)


def _measure_host(target: Target, how: Measurement, out: Path) -> tuple[BenchResult, str]:
    """Measure a host; write and return the result, and the name of the file."""
    began = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    name = f"{target.name.lstrip('@')}-{began.replace(':', '')}"
    out.mkdir(parents=True, exist_ok=True)
    result = _measure(target, how, began, out / name)
    (out / f"{name}.json").write_text(text_of(result), encoding="utf-8")
    return result, name


def _write(results: Sequence[BenchResult], out: Path, name: str) -> str:
    out.mkdir(parents=True, exist_ok=True)
    text = markdown.text_of(results)
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    (out / f"{name}.html").write_text(page.page_of(results), encoding="utf-8")
    note(f"written: {out / name}.md and .html")
    return text


def _print(options: Options, results: Sequence[BenchResult], text: str) -> None:
    print(json.dumps(plain(results), indent=1) if options.json else text)


def _read(path: Path) -> BenchResult:
    try:
        return parse(BenchResult, path.read_text(encoding="utf-8"))
    except (OSError, DocumentError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        fix = "name files that `spark-deploy bench` wrote (DIR/HOST-TIME.json)"
        raise SparkError.one(str(path), f"is not a result of bench: {reason}", fix) from error


def _measure(target: Target, how: Measurement, began: str, files: Path) -> BenchResult:
    """Measure a host; ``files`` is the path of further files, without extension."""
    service = chosen_services(target, how.service or MAIN_SERVICE)[0]
    connection, login = connection_of(target, service=service), login_of(target)
    settings = target.settings.settings
    port = (settings if service == MAIN_SERVICE else settings.of_service(service)).serve.port
    served, release = host.served_by(login, service)
    key = login.told(f"cat {connection.key_path}").strip()
    notes: list[str] = []
    note(f"{target.name}: {served.model} with {served.profile} ({served.release})")
    raw = files.with_name(f"{files.name}.llama-benchy.json")
    with ExitStack() as stack:
        url = connection.base_url
        if connection.tunnel:
            url = f"http://127.0.0.1:{stack.enter_context(host.tunnel(login, port))}/v1"
        endpoint = Endpoint(url, connection.model, key, connection.ca)
        run = _Run(how, login, release, endpoint, notes)
        samples = stack.enter_context(host.sampled(login))
        before = host.drafts(login, service)
        answers = run.seeds()
        benchy_version, cells = run.grid(raw)
        vllm_version, loads = run.loads(port, connection.key_path)
        after = host.drafts(login, service)
    drafted, accepted = (max(0, b - a) for a, b in zip(before, after, strict=True))
    result = BenchResult(
        1, began, served, answers, cells, benchy_version, drafted, accepted, tuple(samples),
        tuple(notes), loads, vllm_version, _published(target, served),
    )  # fmt: skip
    _write_submission(target, release, result, files, raw)
    return result


def _published(target: Target, served: Served) -> tuple[Published, ...]:
    profile = target.catalog.profiles.get((served.profile, served.model))
    return tuple(
        Published(figure.tokens_per_s, figure.source)
        for figure in (profile.published if profile else ())
        if figure.tokens_per_s and figure.requests == 1 and figure.model == served.model
    )


def _write_submission(
    target: Target, release: Release, result: BenchResult, files: Path, raw: Path
) -> None:
    """Write files for Spark Arena and NVIDIA if their protocols ran on a Spark."""
    if not result.cells and not result.loads:
        return
    reason, served = result.served.no_spark, None
    if not reason:
        try:
            plans = build_plan(target).served
            served = next((plan for plan in plans if plan.serve.name == release.name), None)
            reason = "" if served else "the release differs from the settings"
        except SparkError as error:
            reason = error.problems[0].line
    if served is None:
        note(f"{target.name}: no folder for submission. {reason}")
        return
    locked = served.sources[0].locked
    origin = submission.Origin(locked.repo, locked.commit, built=served.checkpoint is not None)
    figures = json.loads(raw.read_text()) if result.cells else None
    folder = files.with_name(f"{files.name}.submission")
    submission.write(folder, result, release, origin, figures)
    note(f"written: {folder}, for Spark Arena and NVIDIA; not sent")


@dataclass(frozen=True, slots=True)
class _Run:
    how: Measurement
    login: host.Login
    release: Release
    endpoint: Endpoint
    notes: list[str]

    def is_requested(self, protocol: str) -> bool:
        return not self.how.protocols or protocol in self.how.protocols

    @property
    def context_tokens(self) -> int:
        return self.release.check.max_model_len

    def skip(self, problem: str, fix: str) -> None:
        """Note a protocol that cannot run.

        Raises:
            SparkError: protocols were requested.
        """
        if self.how.protocols:
            raise SparkError.one(self.login.name, problem, fix)
        self.notes.append(f"{problem}; {fix}")

    def seeds(self) -> tuple[Answer, ...]:
        if not self.is_requested("seeds"):
            return ()
        return tuple(measure(self.endpoint, self.context_tokens, note))

    def loads(self, port: int, key_path: str) -> tuple[str | None, tuple[Load, ...]]:
        if not self.is_requested("vllm-bench"):
            return None, ()
        how = self.how
        sizes = {"prompt_tokens": how.prompt_tokens, "answer_tokens": how.answer_tokens}
        given = {name: value for name, value in sizes.items() if value}
        cases = list(vllm_bench.cases_of(how.clients, self.context_tokens, **given))
        result = vllm_bench.measure(self.login, self.release, port, key_path, cases, note)
        if result[0] is None:
            problem = f"{self.release.image.tag} has no vllm bench serve"
            self.skip(problem, "choose another protocol or image")
        return result

    def grid(self, raw: Path) -> tuple[str | None, tuple[Cell, ...]]:
        if not self.is_requested("llama-benchy"):
            return None, ()
        python = benchy.interpreter()
        if python is None:
            self.skip("llama-benchy is not installed here", "pipx install llama-benchy")
            return None, ()
        how, context_tokens = self.how, self.context_tokens
        full = benchy.Grid(
            tuple(how.depths or benchy.DEPTHS),
            tuple(how.clients or benchy.CONCURRENCIES),
            how.runs or benchy.RUNS,
            how.prompt_tokens or benchy.PROMPT_TOKENS,
            how.answer_tokens or benchy.ANSWER_TOKENS,
        )
        grid = full.fitting(context_tokens)
        if left := [depth for depth in full.depths if depth not in grid.depths]:
            depths = ", ".join(map(str, left))
            self.notes.append(f"depths {depths} exceed the context of {context_tokens} tokens")
        if not grid.depths:
            return None, ()
        note(f"llama-benchy: depths {grid.depths}, clients {grid.concurrencies}, {grid.runs} runs")
        more = ["--book-url", how.book_url] if how.book_url else []
        progress = ticking("llama-benchy", note, _TICK_S)
        with host.tokenizer(self.login, self.release.tree.path) as folder, progress:
            return benchy.measure(python, self.endpoint, folder, grid, raw, more)
