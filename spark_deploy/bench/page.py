"""A result, or several beside each other, as one HTML page that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from spark_deploy.bench import markdown, plots
from spark_deploy.bench.prompts import SEEDS
from spark_deploy.bench.result import BenchResult

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
        yield plots.bars(groups, "tokens per second")
    elif title == markdown.GRID_CHAPTER:
        for clients in sorted({c.concurrency for one in results for c in one.cells}):
            lines = [
                [(float(c.depth_tokens), c.decode_tokens_per_s) for c in one.cells
                 if c.concurrency == clients and c.decode_tokens_per_s is not None]
                for one in results
            ]  # fmt: skip
            what = f"tokens per second by depth, {clients} client{'s' if clients > 1 else ''}"
            yield plots.lines(lines, what)
    elif title == markdown.HOST_CHAPTER:
        memory = [[(s.at_s, s.available_bytes / 1e9) for s in one.samples] for one in results]
        if any(memory):
            yield plots.lines(memory, "GB of memory available, by seconds")


def _legend(results: Sequence[BenchResult]) -> str:
    if len(results) < 2:
        return ""
    marks = (
        f'<span><i style="background:{plots.colour(at)}"></i>{html.escape(name)}</span>'
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
