"""Markdown and self-contained HTML reports, which compare results with the first result."""

import html
import importlib.util
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from spark_deploy.bench.protocols import SEEDS
from spark_deploy.bench.result import Answer, BenchResult, Load

_SEEDS = (
    "five prompts run in sequence with greedy decoding; "
    "speed is the token count in the usage block divided by "
    "wall time; the first of two runs is a warm-up"
)
_GRID = "llama-benchy {} counts streamed tokens; figures are means of its runs, summed over clients"
_LOADS = (
    "vllm bench serve from {} runs on the host with uncached random prompts, greedy decoding and "
    "fixed-length answers; figures are means over all requests"
)
_TOOLS = (
    "greedy requests without thinking; a call is correct if name, types and values match exactly"
)
_SEEDS_TITLE, _GRID_TITLE = "Protocol: seeds", "Protocol: llama-benchy"
_HOST_TITLE = "Host during the benchmark"
Rows = list[list[str]]
Point = tuple[float, float]


def render_markdown(results: Sequence[BenchResult]) -> str:
    lines = [f"# {make_title(results)}", ""]
    for reason in invalid_reasons(results):
        lines += [f"**{reason}**", ""]
    for result in results:
        lines.append(f"- {result.at}: {result.served.release}, {result.served.image}")
        lines += [f"- note: {note}" for note in result.notes]
    for title, protocol, (header, *rows) in sections(results):
        lines += ["", f"## {title}", "", *([protocol, ""] if protocol else [])]
        lines += [f"| {' | '.join(header)} |", "|---" + "|---:" * len(results) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", ""])


def invalid_reasons(results: Sequence[BenchResult]) -> Iterator[str]:
    for result, name in zip(results, column_names(results), strict=True):
        if text := result.served.invalid_reason:
            yield f"{name}: {text}" if len(results) > 1 else text


def sections(results: Sequence[BenchResult]) -> Iterator[tuple[str, str, Rows]]:
    """Yield title, protocol and table for each part that at least one result contains."""
    if any(result.answers for result in results):
        sources = dict.fromkeys(
            f"{figure.tokens_per_s:g} for {result.served.profile}: {figure.source}"
            for result in results
            for figure in result.published
        )
        published = f". Published: {'; '.join(sources)}" if sources else ""
        yield _SEEDS_TITLE, _SEEDS + published, seeds_table(results)
    if any(result.tools for result in results):
        yield "Protocol: tools", _TOOLS, tools_table(results)
    if any(result.cells for result in results):
        versions = dict.fromkeys(result.llama_benchy or "?" for result in results if result.cells)
        yield _GRID_TITLE, _GRID.format(", ".join(versions)), grid_table(results)
    if any(result.loads for result in results):
        versions = dict.fromkeys(f"vLLM {result.vllm}" for result in results if result.loads)
        yield "Protocol: vllm-bench", _LOADS.format(", ".join(versions)), loads_table(results)
    yield _HOST_TITLE, "", host_table(results)


def make_title(results: Sequence[BenchResult]) -> str:
    common = list[str]()
    for form in ("{0.model}", "with {0.profile}", "on {0.host}"):
        texts = {form.format(result.served) for result in results}
        if len(texts) == 1:
            common += texts
    names = " against ".join(column_names(results)) if len(results) > 1 else ""
    return ": ".join(filter(None, (" ".join(common), names)))


def column_names(results: Sequence[BenchResult]) -> list[str]:
    """Return short column names that distinguish the results."""
    served = [result.served for result in results]
    names = [item.profile for item in served]
    if len({item.model for item in served}) > 1:
        names = [f"{item.model} {name}" for item, name in zip(served, names, strict=True)]
    if len({item.host for item in served}) > 1:
        names = [f"{name} on {item.host}" for item, name in zip(served, names, strict=True)]
    if len({item.cpus for item in served}) > 1:
        names = [
            f"{name}, CPUs {item.cpus or 'all'}" for item, name in zip(served, names, strict=True)
        ]
    if len(set(names)) < len(names):
        names = [f"{name}, {result.at}" for result, name in zip(results, names, strict=True)]
    return names


def seeds_table(results: Sequence[BenchResult]) -> Rows:
    rows = [["tok/s", *column_names(results)]]
    runs = [result.warm_answers() for result in results]
    for prompt, tokens, _ in SEEDS:
        speeds = _prompt_speeds(prompt, runs)
        rows.append([f"{prompt} {tokens}", *_compare(speeds)])
    waits_s = ([answer.first_token_s for answer in run.values()] for run in runs)
    best_s = (_format_number(min(waits, default=None), 2) for waits in waits_s)
    rows.append(["first token, s (best)", *best_s])
    if any(result.published for result in results):
        figures = ([f"{figure.tokens_per_s:g}" for figure in r.published] for r in results)
        cells = (", ".join(texts) or "-" for texts in figures)
        rows.append(["published, not measured here", *cells])
    return rows


def _prompt_speeds(prompt: str, runs: Sequence[Mapping[str, Answer]]) -> list[float | None]:
    return [run[prompt].tokens_per_s if prompt in run else None for run in runs]


def tools_table(results: Sequence[BenchResult]) -> Rows:
    columns = [{case.name: case.problem for case in result.tools} for result in results]
    rows = [["", *column_names(results)], ["correct", *map(_score, columns)]]
    for name in dict.fromkeys(name for problems in columns for name in problems):
        cells = [problems.get(name, "-") or "correct" for problems in columns]
        if set(cells) != {"correct"}:
            rows.append([name, *cells])
    return rows


def _score(problems: Mapping[str, str | None]) -> str:
    correct = sum(problem is None for problem in problems.values())
    return f"{correct} of {len(problems)}" if problems else "-"


def grid_table(results: Sequence[BenchResult]) -> Rows:
    rows = [["tok/s at depth, clients", *column_names(results)]]
    columns = [{cell.case: cell for cell in result.cells} for result in results]
    cases = sorted({case for cells in columns for case in cells})
    for case in cases:
        speeds = [cells[case].decode_tokens_per_s if case in cells else None for cells in columns]
        rows.append([", ".join(map(str, case)), *_compare(speeds)])
    # llama-benchy sends the context in an earlier request, so a prefix cache can reuse it.
    for case in cases:
        waits = [cells[case].first_response_ms if case in cells else None for cells in columns]
        title = f"{', '.join(map(str, case))}: time to first token in the next turn, ms"
        rows.append([title, *_compare(waits, 0)])
    return rows


def loads_table(results: Sequence[BenchResult]) -> Rows:
    rows = [["prompt, answer, clients", *column_names(results)]]
    figures: tuple[tuple[str, Callable[[Load], float | None], int], ...] = (
        ("tok/s, sum over all clients", lambda load: load.output_tokens_per_s, 1),
        ("tok/s per client after the first token", lambda load: load.decode_tokens_per_s, 1),
        ("prompt tokens/s until the first token", lambda load: load.prefill_tokens_per_s, 0),
        ("first token, ms", lambda load: load.first_token_ms, 0),
    )
    for case in sorted({load.case for result in results for load in result.loads}):
        loads = [{load.case: load for load in result.loads}.get(case) for result in results]
        for title, figure, digits in figures:
            values = [figure(load) if load else None for load in loads]
            rows.append([f"{', '.join(map(str, case))}: {title}", *_compare(values, digits)])
    return rows


def host_table(results: Sequence[BenchResult]) -> Rows:
    rows = [["", *column_names(results)]]
    available_gb = ([s.available_bytes / 1e9 for s in result.samples] for result in results)
    minimums = (min(values, default=None) for values in available_gb)
    rows.append(["minimum memory available, GB", *(_format_number(gb, 1) for gb in minimums)])
    for title, field in (
        ("maximum temperature, °C", "temperature_c"),
        ("maximum power, W", "power_w"),
    ):
        columns = ([getattr(sample, field) for sample in result.samples] for result in results)
        maximums = (max((v for v in column if v is not None), default=None) for column in columns)
        rows.append([title, *(_format_number(maximum, 0) for maximum in maximums)])
    shares = (result.acceptance_fraction for result in results)
    rows.append(["drafts accepted", *("-" if s is None else f"{s:.0%}" for s in shares)])
    return rows


def _compare(values: Sequence[float | None], digits: int = 1) -> list[str]:
    """Format the values, each with the difference from the first."""
    first, texts = values[0], [_format_number(value, digits) for value in values]
    for index, value in enumerate(values[1:], 1):
        if first and value is not None:
            texts[index] += f" ({(value / first - 1) * 100:+.0f} %)"
    return texts


def _format_number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


_STYLE = """
:root{color-scheme:light dark;--fg:#1c2024;--dim:#60646c;--bg:#fcfcfd;--card:#fff;--line:#e0e1e6}
@media(prefers-color-scheme:dark){
:root{--fg:#edeef0;--dim:#b0b4ba;--bg:#111113;--card:#18191b;--line:#2e3135}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);margin:0 auto;
max-width:60rem;padding:2rem 1.25rem 4rem}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .25rem}
h2{font-size:1.15rem;margin:2.25rem 0 .25rem}
p{color:var(--dim);margin:.25rem 0 .75rem;overflow-wrap:anywhere}
p strong{color:var(--fg)}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:1rem 1.25rem;margin:.75rem 0;overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:.35rem .6rem;border-bottom:1px solid var(--line);text-align:right;
white-space:nowrap}
td:first-child,th:first-child{text-align:left}
th{font-weight:600;color:var(--dim)}
tr:last-child td{border-bottom:0}
svg{width:100%;min-width:34rem;height:auto;display:block;color:var(--dim)}
"""


def render_page(results: Sequence[BenchResult]) -> str:
    escape = html.escape
    title = escape(make_title(results))
    body = [f"<h1>{title}</h1>"]
    body += [f"<p><strong>{escape(text)}</strong></p>" for text in invalid_reasons(results)]
    for result, name in zip(results, column_names(results), strict=True):
        prefix = f"{name} · " if len(results) > 1 else ""
        about = f"{result.at} · {result.served.release} · {result.served.image}"
        body += [f"<p>{escape(prefix + text)}</p>" for text in (about, *result.notes)]
    for heading, protocol, rows in sections(results):
        body.append(f"<h2>{escape(heading)}</h2>")
        body += [f"<p>{escape(protocol)}</p>"] if protocol else []
        plots = _plots(heading, results) if has_plots() else ()
        body += [f"<section>{plot}</section>" for plot in plots]
        table = ""
        for number, row in enumerate(rows):
            tag = "td" if number else "th"
            cells = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
            table += f"<tr>{cells}</tr>"
        body.append(f"<section><table>{table}</table></section>")
    lines = "\n".join(body)
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n{lines}\n</html>\n"
    )


def _plots(heading: str, results: Sequence[BenchResult]) -> Iterator[str]:
    names = column_names(results)
    if heading == _SEEDS_TITLE:
        runs = [result.warm_answers() for result in results]
        groups = [(prompt, _prompt_speeds(prompt, runs)) for prompt, *_ in SEEDS]
        yield draw_bars(groups, "tokens per second", names)
    elif heading == _GRID_TITLE:
        for clients in sorted({cell.concurrency for result in results for cell in result.cells}):
            lines = [
                [(float(cell.depth_tokens), cell.decode_tokens_per_s) for cell in result.cells
                 if cell.concurrency == clients and cell.decode_tokens_per_s is not None]
                for result in results
            ]  # fmt: skip
            plural = "s" if clients > 1 else ""
            title = f"tokens per second by depth, {clients} client{plural}"
            yield draw_lines(lines, title, names, "o")
    elif heading == _HOST_TITLE and any(result.samples for result in results):
        memory = [[(s.at_s, s.available_bytes / 1e9) for s in result.samples] for result in results]
        yield draw_lines(memory, "available memory (GB) over time (seconds)", names)


def has_plots() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw_bars(
    groups: Sequence[tuple[str, Sequence[float | None]]], title: str, names: Sequence[str] = ()
) -> str:
    """Return an SVG with a bar for each value, in named groups."""

    def draw(axes: Any) -> None:
        series = list(zip(*(values for _, values in groups), strict=True))
        width = 0.7 / len(series)
        for index, values in enumerate(series):
            offset = (index - (len(series) - 1) / 2) * width
            positions = [x + offset for x, value in enumerate(values) if value is not None]
            heights = [value for value in values if value is not None]
            label = names[index] if names else None
            bars = axes.bar(positions, heights, width * 0.92, label=label)
            axes.bar_label(
                bars, fmt=lambda v: f"{v:,.1f}" if v < 100 else f"{v:,.0f}", padding=2, fontsize=8
            )
        axes.set_xticks(range(len(groups)), [name for name, _ in groups])

    return _draw(draw, title)


def draw_lines(
    series: Sequence[Sequence[Point]], title: str, names: Sequence[str], marker: str = ""
) -> str:
    """Return an SVG with a line for each series."""

    def draw(axes: Any) -> None:
        for points, name in zip(series, names, strict=True):
            axes.plot([x for x, _ in sorted(points)], [y for _, y in sorted(points)],
                      marker=marker, label=name)  # fmt: skip

    return _draw(draw, title)


# A placeholder for the page's text color, which may be light or dark.
_INK = "#010203"
_PLOT_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "text.color": _INK,
    "axes.edgecolor": _INK, "xtick.color": _INK, "ytick.color": _INK, "axes.titlelocation": "left",
    "axes.titlesize": 11, "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
    "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False,
}  # fmt: skip
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def _draw(draw: Callable[[Any], None], title: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_PLOT_STYLE, "svg.hashsalt": title}):
        figure, output = Figure(figsize=(7.6, 2.8), layout="constrained"), io.StringIO()
        axes = figure.subplots()
        draw(axes)
        axes.set_title(title)
        axes.margins(y=0.12)
        axes.set_ylim(bottom=0)
        _, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            figure.legend(loc="outside upper right", ncols=4)
        figure.savefig(output, format="svg", transparent=True, metadata=_NO_METADATA)
    svg = output.getvalue()
    return svg[svg.index("<svg") :].replace(_INK, "currentColor")
