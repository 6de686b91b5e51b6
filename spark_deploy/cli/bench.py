"""``spark-deploy bench``: measure what hosts serve, through their gateways; compare results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

from spark_contract.documents import DocumentError, parse, plain, text_of
from spark_contract.units import MAIN_SERVICE

from spark_deploy.bench import benchy, host, markdown, page, seeds
from spark_deploy.bench.client import Endpoint
from spark_deploy.bench.result import BenchResult, Cell
from spark_deploy.cli.commands import Options
from spark_deploy.cli.connect import connection_of, login_of
from spark_deploy.cli.hosts import Listed, listed, say
from spark_deploy.errors import SparkError


def run(options: Options) -> int:
    """Measure the chosen hosts one after the other, or compare files."""
    out = Path(options.out)
    if options.compare:
        results = [_read(Path(name)) for name in options.compare]
        return _written(options, results, out, "comparison")
    for one in listed(options):
        began = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        name = f"{one.name.lstrip('@')}-{began.replace(':', '')}"
        out.mkdir(parents=True, exist_ok=True)
        result = measured(one, options, began, out / f"{name}.llama-benchy.json")
        (out / f"{name}.json").write_text(text_of(result))
        _written(options, [result], out, name)
    return 0


def _written(options: Options, results: Sequence[BenchResult], out: Path, name: str) -> int:
    out.mkdir(parents=True, exist_ok=True)
    text = markdown.text_of(results)
    (out / f"{name}.md").write_text(text)
    (out / f"{name}.html").write_text(page.page_of(results))
    print(json.dumps(plain(results), indent=1) if options.json else text)
    say(f"written: {out / name}.md and .html")
    return 0


def _read(path: Path) -> BenchResult:
    try:
        return parse(BenchResult, path.read_text(encoding="utf-8"))
    except (OSError, DocumentError) as error:
        fix = "name files that `spark-deploy bench` wrote (DIR/HOST-TIME.json)"
        raise SparkError.one(str(path), f"is no result of a bench: {error}", fix) from error


def measured(one: Listed, options: Options, began: str, raw: Path) -> BenchResult:
    """Measure one host; what llama-benchy writes of it goes to ``raw``."""
    connection = connection_of(one)
    login = login_of(one)
    served, context_tokens = host.served_by(login, MAIN_SERVICE)
    key = login.told(f"cat {connection.key_path}").strip()
    wanted = options.protocol or ["seeds", "llama-benchy"]
    notes: list[str] = []
    say(f"{one.name}: {served.model} with {served.profile} ({served.release})")
    with ExitStack() as held:
        url = connection.base_url
        if connection.tunnel:
            here = held.enter_context(host.tunnel(login, one.settings.settings.serve.port))
            url = f"http://127.0.0.1:{here}/v1"
        endpoint = Endpoint(url, connection.model, key, connection.ca)
        samples = held.enter_context(host.sampled(login))
        before = host.drafts(login, MAIN_SERVICE)
        answers = tuple(seeds.measure(endpoint, context_tokens, say)) if "seeds" in wanted else ()
        version: str | None = None
        cells: tuple[Cell, ...] = ()
        if "llama-benchy" in wanted:
            version, cells = _grid(
                options, endpoint, login, served.tree, context_tokens, notes, raw
            )
        after = host.drafts(login, MAIN_SERVICE)
    drafted, accepted = (max(0, b - a) for a, b in zip(before, after, strict=True))
    return BenchResult(
        1, began, served, answers, cells, version, drafted, accepted, tuple(samples), tuple(notes)
    )


def _grid(
    options: Options, endpoint: Endpoint, login: host.Login, tree: str,
    context_tokens: int, notes: list[str], raw: Path,
) -> tuple[str | None, tuple[Cell, ...]]:  # fmt: skip
    python = benchy.interpreter()
    if python is None:
        fix = "pipx install llama-benchy"
        if options.protocol:
            raise SparkError.one("llama-benchy", "is not installed on this machine", fix)
        notes.append(f"llama-benchy is not installed on the machine that measured; {fix}")
        return None, ()
    whole = benchy.Grid(
        tuple(options.depths or benchy.DEPTHS),
        tuple(options.clients or benchy.CONCURRENCIES),
        options.runs or benchy.RUNS,
        options.pp or benchy.PROMPT_TOKENS,
        options.tg or benchy.ANSWER_TOKENS,
    )
    grid = whole.fitting(context_tokens)
    if left := [depth for depth in whole.depths if depth not in grid.depths]:
        depths = ", ".join(map(str, left))
        notes.append(f"depths {depths} do not fit into {context_tokens} tokens of context")
    if not grid.depths:
        return None, ()
    say(f"llama-benchy: depths {grid.depths}, clients {grid.concurrencies}, {grid.runs} runs each")
    more = ["--book-url", options.book_url] if options.book_url else []
    with host.tokenizer(login, tree) as folder:
        return benchy.measure(python, endpoint, folder, grid, raw, more)
