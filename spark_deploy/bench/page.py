"""A result, or several beside each other, as one HTML page that needs nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence

from spark_deploy.bench import markdown
from spark_deploy.bench.load import RUNS, SEEDS, Endpoint, ask
from spark_deploy.bench.result import Answer, BenchResult
from spark_deploy.ticking import ticking

_COLOURS = ("#3e63dd", "#e5484d", "#30a46c", "#f76b15", "#8e4ec6")
_WIDTH, _HEIGHT = 760, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 34, 30

Point = tuple[float, float]


def colour(at: int) -> str:
    """Return the colour of the result at this place."""
    return _COLOURS[at % len(_COLOURS)]


def bars(groups: Sequence[tuple[str, Sequence[float | None]]], title: str) -> str:
    """Return a bar for each value, side by side in named groups."""
    highest = _round_up(max((v for _, values in groups for v in values if v), default=1.0))
    return _plot(title, highest, _bars(groups, highest))


def plot_lines(series: Sequence[Sequence[Point]], title: str) -> str:
    """Return a line for each series, over a common scale from zero."""
    points = [point for one in series for point in one]
    highest = _round_up(max((y for _, y in points), default=1.0))
    furthest = max((x for x, _ in points), default=1.0) or 1.0
    return _plot(title, highest, _lines(series, highest, furthest))


def _plot(title: str, highest: float, drawn: Iterator[str]) -> str:
    said = html.escape(title)
    inner = "".join((*_scale(highest), *drawn))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{said}">'
        f'<text x="{_LEFT}" y="16">{said}</text>{inner}</svg>'
    )


def _scale(highest: float) -> Iterator[str]:
    for step in range(5):
        value = highest * step / 4
        y = _y(value, highest)
        yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{_short(value)}</text>'


def _bars(groups: Sequence[tuple[str, Sequence[float | None]]], highest: float) -> Iterator[str]:
    room = (_WIDTH - _LEFT - _RIGHT) / max(1, len(groups))
    for at, (name, values) in enumerate(groups):
        width = min(48.0, room * 0.7 / max(1, len(values)))
        start = _LEFT + room * (at + 0.5) - width * len(values) / 2
        for place, value in enumerate(values):
            if value is None:
                continue
            x, y = start + place * width, _y(value, highest)
            height = _HEIGHT - _BOTTOM - y
            yield (
                f'<rect x="{x + 2:.1f}" y="{y}" width="{width - 4:.1f}" height="{height:.1f}" '
                f'rx="3" fill="{colour(place)}"/>'
            )
            middle = x + width / 2
            yield (
                f'<text class="value" x="{middle:.1f}" y="{y - 5:.1f}" '
                f'text-anchor="middle">{_short(value)}</text>'
            )
        centre = _LEFT + room * (at + 0.5)
        yield f'<text x="{centre:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">' \
            f"{html.escape(name)}</text>"  # fmt: skip


def _lines(series: Sequence[Sequence[Point]], highest: float, furthest: float) -> Iterator[str]:
    def x_of(value: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * value / furthest, 1)

    for step in range(5):
        value = furthest * step / 4
        anchor = "end" if step == 4 else "middle"
        x = x_of(value)
        yield f'<text x="{x}" y="{_HEIGHT - 10}" text-anchor="{anchor}">{_short(value)}</text>'
    for at, one in enumerate(series):
        places = [(x_of(x), _y(y, highest)) for x, y in sorted(one)]
        path = " ".join(f"{x},{y}" for x, y in places)
        yield f'<polyline points="{path}" fill="none" stroke="{colour(at)}" stroke-width="2"/>'
        if len(places) <= 20:
            for x, y in places:
                yield f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour(at)}"/>'


def _y(value: float, highest: float) -> float:
    return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / highest, 1)


def _round_up(value: float) -> float:
    """Return the next number that four even steps divide well."""
    size = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(
        (size * step for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 6, 8, 10) if size * step >= value),
        value,
    )


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


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
svg{width:100%;min-width:34rem;height:auto;display:block}
svg text{fill:var(--dim);font:12px system-ui,sans-serif}
svg .value{fill:var(--fg)}
svg .axis{stroke:var(--line)}
.legend{position:sticky;top:0;background:var(--bg);padding:.4rem 0;z-index:1}
.legend span{margin-right:1.25rem}
.legend i{display:inline-block;width:.75rem;height:.75rem;border-radius:3px;margin-right:.4rem}
"""


def page_of(results: Sequence[BenchResult]) -> str:
    """Return the page; several results are compared, the first one is compared against."""
    title = markdown.title_of(results)
    body = "\n".join(_body(title, results))
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n{body}\n</html>\n"
    )


def _body(title: str, results: Sequence[BenchResult]) -> Iterator[str]:
    yield f"<h1>{html.escape(title)}</h1>"
    yield from (
        f"<p><strong>{html.escape(text)}</strong></p>" for text in markdown.no_spark(results)
    )
    several = len(results) > 1
    for one, name in zip(results, markdown.names_of(results), strict=True):
        of = f"{name} · " if several else ""
        yield f"<p>{html.escape(f'{of}{one.at} · {one.served.release} · {one.served.image}')}</p>"
        yield from (f"<p>{html.escape(f'{of}{note}')}</p>" for note in one.notes)
    yield _legend(results)
    for title, said, rows in markdown.chapters(results):
        yield from _chapter(title, said)
        yield from (f"<section>{plot}</section>" for plot in _plots(title, results))
        yield _table(rows)


def _plots(title: str, results: Sequence[BenchResult]) -> Iterator[str]:
    """Yield the pictures of a chapter."""
    if title == markdown.SEEDS_CHAPTER:
        found = [{a.prompt: a.tokens_per_s for a in one.warm()} for one in results]
        groups = [(p.name, [speeds.get(p.name) for speeds in found]) for p in SEEDS]
        yield bars(groups, "tokens per second")
    elif title == markdown.GRID_CHAPTER:
        for clients in sorted({c.concurrency for one in results for c in one.cells}):
            lines = [
                [(float(c.depth_tokens), c.decode_tokens_per_s) for c in one.cells
                 if c.concurrency == clients and c.decode_tokens_per_s is not None]
                for one in results
            ]  # fmt: skip
            what = f"tokens per second by depth, {clients} client{'s' if clients > 1 else ''}"
            yield plot_lines(lines, what)
    elif title == markdown.HOST_CHAPTER:
        memory = [[(s.at_s, s.available_bytes / 1e9) for s in one.samples] for one in results]
        if any(memory):
            yield plot_lines(memory, "GB of memory available, by seconds")


def _legend(results: Sequence[BenchResult]) -> str:
    if len(results) < 2:
        return ""
    marks = (
        f'<span><i style="background:{colour(at)}"></i>{html.escape(name)}</span>'
        for at, name in enumerate(markdown.names_of(results))
    )
    return f'<p class="legend">{"".join(marks)}</p>'


def _chapter(title: str, said: str) -> Iterator[str]:
    yield f"<h2>{html.escape(title)}</h2>"
    if said:
        yield f"<p>{html.escape(said)}</p>"


def _table(rows: markdown.Rows) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    lines = (
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows[1:]
    )
    return f"<section><table><tr>{head}</tr>{''.join(lines)}</table></section>"


def measure(
    endpoint: Endpoint, context_tokens: int, say: Callable[[str], None]
) -> Iterator[Answer]:
    """Yield an answer for each prompt and run.

    Args:
        endpoint: who is asked.
        context_tokens: what the engine takes in all; longer answers are asked for shorter.
        say: tells a person each figure.
    """
    for run in range(1, RUNS + 1):
        for prompt in SEEDS:
            tokens = min(prompt.tokens, context_tokens // 2)
            at = f"seeds, run {run}, {prompt.name}"
            with ticking(at, say):
                timed = ask(endpoint, prompt.text, tokens)
            answer = Answer(
                prompt.name, run, tokens, timed.prompt_tokens, timed.completion_tokens,
                round(timed.first_token_s, 4), round(timed.wall_s, 4),
            )  # fmt: skip
            told = (
                f"{answer.tokens_per_s:.1f} tok/s, first token after {answer.first_token_s:.2f} s"
            )
            say(f"{at}: {answer.completion_tokens} tokens, {told}")
            yield answer
