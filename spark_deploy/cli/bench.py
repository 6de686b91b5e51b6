"""``spark-deploy bench``: measure servers and compare results."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import click
from spark_contract.documents import DocumentError, parse, to_json, to_plain
from spark_contract.release import Release
from spark_contract.units import MAIN_SERVICE

from spark_deploy.bench import host, protocols, report
from spark_deploy.bench.host import LoadCase, ticking
from spark_deploy.bench.result import Answer, BenchResult, Cell, Load, Published, Served, ToolCase
from spark_deploy.bench.submission import Origin, write_submission
from spark_deploy.cli import changes
from spark_deploy.cli.connect import make_connection, make_login, open_endpoint
from spark_deploy.cli.console import FILE, FOLDER, Options, note, service_option, shared_options
from spark_deploy.cli.hosts import Target, build_plan, select_hosts, selected_services
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.errors import SparkError

_TICK_S = 30.0  # between notes; a run takes hours
_COUNT = click.IntRange(min=1)
_PROTOCOL = click.Choice(["seeds", "tools", "llama-benchy", "vllm-bench"])
_Sizes = TypeVar("_Sizes", protocols.Grid, LoadCase)


@dataclass(frozen=True, slots=True)
class Measurement:
    protocols: tuple[str, ...] = ()  # empty for all protocols that are installed
    service: str | None = None
    depths: tuple[int, ...] = ()
    clients: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    runs: int | None = None
    book_url: str | None = None

    def apply(self, sizes: _Sizes) -> _Sizes:
        """Return ``sizes`` with the prompt and answer lengths that the user requested."""
        return replace(
            sizes,
            prompt_tokens=self.prompt_tokens or sizes.prompt_tokens,
            answer_tokens=self.answer_tokens or sizes.answer_tokens,
        )


def _numbers_option(name: str, minimum: int, text: str) -> Callable[..., Any]:
    """Return a repeatable option for comma-separated numbers."""

    def parse(value: str) -> list[int]:
        numbers = [int(number) for number in value.split(",")]
        if min(numbers) < minimum:
            raise ValueError(value)
        return numbers

    def join(_context: click.Context, _option: click.Parameter, lists: Any) -> tuple[int, ...]:
        return tuple(number for numbers in lists for number in numbers)

    return click.option(name, multiple=True, type=parse, callback=join, metavar="N,...", help=text)


@click.command
@click.option("--out", metavar="DIR", default="bench", type=FOLDER, help="Folder for results.")
@click.option(
    "--protocol",
    "protocols",
    type=_PROTOCOL,
    multiple=True,
    help="Run only this protocol; repeatable.",
)
@click.option("--tools", is_flag=True, help="Score 20 tool calls; same as --protocol tools.")
@service_option("Use this service instead of the main one.")
@click.option("--compare", metavar="FILE", type=FILE, multiple=True, help="Compare result files.")
@_numbers_option("--depths", 0, "Context depths for llama-benchy to measure.")
@_numbers_option("--clients", 1, "Concurrent clients.")
@click.option("--pp", "prompt_tokens", type=_COUNT, metavar="N", help="Tokens per prompt.")
@click.option("--tg", "answer_tokens", type=_COUNT, metavar="N", help="Tokens per answer.")
@click.option("--runs", type=_COUNT, metavar="N", help="Runs per measurement.")
@click.option(
    "--ladder",
    is_flag=True,
    help="Deploy and measure each published profile, then restore your settings.",
)
@click.option("-y", "--yes", is_flag=True, help="Skip the confirmation of --ladder.")
@click.option("--book-url", metavar="URL", help="URL of the text for llama-benchy's prompts.")
@shared_options(plans=True)
def bench(
    options: Options, out: str, compare: Sequence[str], ladder: bool, tools: bool, **choices: Any
) -> int:
    if tools:
        choices["protocols"] += ("tools",)
    folder, measurement = Path(out), Measurement(**choices)
    code, results = 0, list[BenchResult]()
    if compare:
        results = [_read_result(Path(file)) for file in compare]
        _write_report(options, results, folder, "comparison")
    elif ladder:
        code, results = run_ladder(
            options, lambda target: _measure_host(target, measurement, folder)[0]
        )
        if results:
            _write_report(options, results, folder, "ladder")
    else:
        for target in select_hosts(options, must_serve=False):
            result, name = _measure_host(target, measurement, folder)
            results.append(result)
            _write_report(options, [result], folder, name)
    if options.json and results:
        print(json.dumps(to_plain(results), indent=1))
    return code


def list_stages(target: Target) -> list[str]:
    """Return the model's profiles that are stages, in order; raise if there are none."""
    model = target.settings.model
    profiles_by_stage = {
        profile.stage: name
        for (name, profile_model), profile in target.catalog.profiles.items()
        if profile_model == model and profile.stage
    }
    if not profiles_by_stage:
        fix = "set `stage` in the profiles in catalog/"
        raise SparkError.single(target.name, f"{model} has no profile with a stage", fix)
    return [name for _, name in sorted(profiles_by_stage.items())]


def run_ladder(
    options: Options, measure_host: Callable[[Target], BenchResult]
) -> tuple[int, list[BenchResult]]:
    """Deploy and measure each stage, then deploy the user's settings again."""
    hosts = select_hosts(options)
    names = [target.name for target in hosts]
    steps = [replace(options, profile=stage) for stage in list_stages(hosts[0])]
    for step in steps:
        for target in select_hosts(step):
            build_plan(target)  # raises before the first deploy if a stage cannot be served
    stages = ", ".join(str(step.profile) for step in steps)
    changes.confirm(
        options,
        f"{', '.join(names)}: serve {stages} one after another, then restore your settings? "
        "Clients get 503 during each change.",
    )
    results: list[BenchResult] = []
    try:
        for step in steps:
            if code := _deploy(step, names):
                note(f"stopping --ladder, because {step.profile} could not be deployed")
                return code, results
            results += [measure_host(target) for target in select_hosts(step)]
    finally:
        note("deploying your settings again")
        code_after = _deploy(options, names)
    return code_after, results


def _deploy(options: Options, names: Sequence[str]) -> int:
    changes.print_command(changes.pyinfra_command("up", options, names, ["-y"]))
    return changes.deploy("up", select_hosts(options), options)


def _measure_host(target: Target, measurement: Measurement, out: Path) -> tuple[BenchResult, str]:
    started_at = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    name = f"{target.name.lstrip('@')}-{started_at.replace(':', '')}"
    out.mkdir(parents=True, exist_ok=True)
    result = _measure(target, measurement, started_at, out / name)
    (out / f"{name}.json").write_text(to_json(result), encoding="utf-8")
    return result, name


def _write_report(options: Options, results: Sequence[BenchResult], out: Path, name: str) -> None:
    """Write the reports; print the text unless JSON is requested."""
    out.mkdir(parents=True, exist_ok=True)
    text = report.render_markdown(results)
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    (out / f"{name}.html").write_text(report.render_page(results), encoding="utf-8")
    note(f"written: {out / name}.md and .html")
    if not report.has_plots():
        note("the report has no plots; run `pip install 'dgx-spark-deploy[bench]'` for plots")
    if not options.json:
        print(text)


def _read_result(path: Path) -> BenchResult:
    try:
        return parse(BenchResult, path.read_text(encoding="utf-8"))
    except (OSError, DocumentError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        fix = "pass files written by `spark-deploy bench` (DIR/HOST-TIME.json)"
        raise SparkError.single(str(path), f"invalid benchmark result: {reason}", fix) from error


def _measure(
    target: Target, measurement: Measurement, started_at: str, output_stem: Path
) -> BenchResult:
    service = selected_services(target, measurement.service or MAIN_SERVICE)[0]
    connection, login = make_connection(target, service=service), make_login(target)
    served, release = host.read_served(login, service)
    notes: list[str] = []
    note(f"{target.name}: {served.model} with {served.profile} ({served.release})")
    raw_path = output_stem.with_name(f"{output_stem.name}.llama-benchy.json")
    with ExitStack() as stack:
        endpoint = stack.enter_context(open_endpoint(target, service))
        context_tokens = release.check.max_model_len
        run = _Run(measurement, login, release, endpoint, notes, context_tokens)
        samples = stack.enter_context(host.sample_host(login))
        before = host.read_draft_counters(login, service)
        answers = run.measure_seeds()
        tool_cases = run.measure_tools()
        benchy_version, cells = run.measure_grid(raw_path)
        vllm_version, loads = run.measure_loads(connection.port, connection.key_path)
        after = host.read_draft_counters(login, service)
    # The counters decrease if the engine restarted.
    drafted, accepted = (max(0, b - a) for a, b in zip(before, after, strict=True))
    result = BenchResult(
        1, started_at, served, answers, cells, benchy_version, drafted, accepted, tuple(samples),
        tuple(notes), loads, vllm_version, tool_cases, published_figures(target.catalog, served),
    )  # fmt: skip
    if cells or loads:
        _write_submission_folder(target, release, result, output_stem, raw_path)
    return result


def published_figures(catalog: Catalog, served: Served) -> tuple[Published, ...]:
    profile = catalog.profiles.get((served.profile, served.model))
    return tuple(
        Published(figure.tokens_per_s, figure.source)
        for figure in (profile.published if profile else ())
        if figure.tokens_per_s and figure.requests == 1 and figure.model == served.model
    )


def _write_submission_folder(
    target: Target, release: Release, result: BenchResult, output_stem: Path, raw_path: Path
) -> None:
    plan, reason = None, result.served.invalid_reason
    if not reason:
        try:
            plans = build_plan(target).served
            plan = next((plan for plan in plans if plan.release.name == release.name), None)
            reason = "The running release differs from the settings."
        except SparkError as error:
            reason = error.problems[0].line
    if plan is None:
        note(f"{target.name}: cannot write a submission folder. {reason}")
        return
    locked = plan.sources[0].locked
    origin = Origin(locked.repo, locked.commit, is_built=plan.checkpoint is not None)
    figures = json.loads(raw_path.read_text()) if result.cells else None
    folder = output_stem.with_name(f"{output_stem.name}.submission")
    write_submission(folder, result, release, origin, figures)
    note(f"written: {folder}; you can send it to Spark Arena and NVIDIA")


@dataclass(frozen=True, slots=True)
class _Run:
    """The protocols of a measurement; each returns an empty result if not requested."""

    measurement: Measurement
    login: host.Login
    release: Release
    endpoint: protocols.Endpoint
    notes: list[str]
    context_tokens: int

    def is_requested(self, protocol: str) -> bool:
        return not self.measurement.protocols or protocol in self.measurement.protocols

    def skip(self, problem: str, fix: str) -> None:
        """Note why a protocol cannot run; raise instead if the user selected protocols."""
        if self.measurement.protocols:
            raise SparkError.single(self.login.name, problem, fix)
        self.notes.append(f"{problem}; {fix}")

    def measure_seeds(self) -> tuple[Answer, ...]:
        if not self.is_requested("seeds"):
            return ()
        return tuple(protocols.measure_seeds(self.endpoint, self.context_tokens, note))

    def measure_tools(self) -> tuple[ToolCase, ...]:
        if not self.is_requested("tools"):
            return ()
        if "--tool-call-parser" not in self.release.engine.argv:
            self.skip(
                "the model has no tool call parser", "set parsers.tool_call in its model file"
            )
            return ()
        return tuple(protocols.measure_tools(self.endpoint, note))

    def measure_loads(self, port: int, key_path: str) -> tuple[str | None, tuple[Load, ...]]:
        if not self.is_requested("vllm-bench"):
            return None, ()
        case = self.measurement.apply(LoadCase())
        cases = [
            replace(case, concurrency=clients).limited_to(self.context_tokens)
            for clients in self.measurement.clients or [1]
        ]
        result = host.measure_loads(self.login, self.release, port, key_path, cases, note)
        vllm_version, _ = result
        if vllm_version is None:
            problem = f"image {self.release.image.tag} does not contain `vllm bench serve`"
            self.skip(problem, "choose another protocol or image")
        return result

    def measure_grid(self, raw_path: Path) -> tuple[str | None, tuple[Cell, ...]]:
        if not self.is_requested("llama-benchy"):
            return None, ()
        python = protocols.find_benchy_python()
        if python is None:
            self.skip("llama-benchy is not installed", "run `pipx install llama-benchy`")
            return None, ()
        requested = self.measurement.apply(protocols.Grid())
        requested = replace(
            requested,
            depths=self.measurement.depths or requested.depths,
            concurrencies=self.measurement.clients or requested.concurrencies,
            runs=self.measurement.runs or requested.runs,
        )
        grid = requested.limited_to(self.context_tokens)
        if excluded := [str(depth) for depth in requested.depths if depth not in grid.depths]:
            context = f"the context of {self.context_tokens} tokens"
            self.notes.append(f"depths {', '.join(excluded)} exceed {context}")
        if not grid.depths:
            return None, ()
        note(f"llama-benchy: depths {grid.depths}, clients {grid.concurrencies}, {grid.runs} runs")
        book_url = self.measurement.book_url
        options = ["--book-url", book_url] if book_url else []
        progress = ticking("llama-benchy", note, _TICK_S)
        with host.copy_tokenizer(self.login, self.release.tree.path) as folder, progress:
            return protocols.measure_grid(python, self.endpoint, folder, grid, raw_path, options)
