"""A result, or several beside each other, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from spark_deploy.bench.load import SEEDS
from spark_deploy.bench.result import BenchResult, Cell, Load

PROTOCOLS = {
    "seeds": "five prompts, one after the other, greedy; tokens of the usage block over wall time; "
    "second run, the first one warms up",
    "llama-benchy": "llama-benchy {version}: means over its runs, all clients "
    "together; counts tokens of the stream",
    "vllm-bench": "vllm bench serve of {version}, on the host itself: random prompts that nothing "
    "has cached, greedy, answers of a fixed length; means over all requests",
}

SEEDS_CHAPTER, GRID_CHAPTER = "Protocol: seeds", "Protocol: llama-benchy"
THEIRS = "published by others, not ours"
HOST_CHAPTER = "The host meanwhile"


def text_of(results: Sequence[BenchResult]) -> str:
    """Return the report; several results become columns, the first one is compared against."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Sequence[BenchResult]) -> Iterator[str]:
    yield f"# {title_of(results)}"
    yield ""
    yield from (line for text in no_spark(results) for line in (f"**{text}**", ""))
    for one in results:
        yield f"- {one.at}: {one.served.release}, {one.served.image}"
        yield from (f"- note: {note}" for note in one.notes)
    yield ""
    for title, said, rows in chapters(results):
        yield from (f"## {title}", "", *((said, "") if said else ()))
        yield from table(rows)


def no_spark(results: Sequence[BenchResult]) -> Iterator[str]:
    """Yield why figures are not a Spark's; of several results also whose."""
    for one, name in zip(results, names_of(results), strict=True):
        if text := one.served.no_spark:
            yield f"{name}: {text}" if len(results) > 1 else text


Rows = list[list[str]]


def chapters(results: Sequence[BenchResult]) -> Iterator[tuple[str, str, Rows]]:
    """Yield title, protocol and table of each part that any of the results has."""
    if any(one.answers for one in results):
        yield SEEDS_CHAPTER, _seeds_said(results), seeds_table(results)
    if any(one.cells for one in results):
        versions = ", ".join(dict.fromkeys(one.llama_benchy or "?" for one in results if one.cells))
        said = PROTOCOLS["llama-benchy"].format(version=versions)
        yield GRID_CHAPTER, said, grid_table(results)
    if any(one.loads for one in results):
        versions = ", ".join(dict.fromkeys(f"vLLM {one.vllm}" for one in results if one.loads))
        said = PROTOCOLS["vllm-bench"].format(version=versions)
        yield "Protocol: vllm-bench", said, loads_table(results)
    yield HOST_CHAPTER, "", host_table(results)


def title_of(results: Sequence[BenchResult]) -> str:
    """Return what all results share, and of several what tells them apart."""
    if len(results) == 1:
        return results[0].title
    shared = [
        text
        for form in ("{0.model}", "with {0.profile}", "on {0.host}")
        if len({text := form.format(one.served) for one in results}) == 1
    ]
    return ": ".join(filter(None, (" ".join(shared), " against ".join(names_of(results)))))


def names_of(results: Sequence[BenchResult]) -> list[str]:
    """Name each result as shortly as tells them apart."""
    served = [one.served for one in results]
    names = [one.profile for one in served]
    if len({one.model for one in served}) > 1:
        names = [f"{one.model} {name}" for one, name in zip(served, names, strict=True)]
    if len({one.host for one in served}) > 1:
        names = [f"{name} on {one.host}" for one, name in zip(served, names, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{name}, {one.at}" for one, name in zip(results, names, strict=True)]
    return names


def seeds_table(results: Sequence[BenchResult]) -> Rows:
    """Return tokens per second by prompt, with the change against the first result."""
    rows = [["tok/s", *names_of(results)]]
    found = [{answer.prompt: answer for answer in one.warm()} for one in results]
    for prompt in SEEDS:
        speeds = [one[prompt.name].tokens_per_s if prompt.name in one else None for one in found]
        rows.append([f"{prompt.name} {prompt.tokens}", *_against_first(speeds)])
    firsts = [min((answer.first_token_s for answer in one.warm()), default=None) for one in results]
    rows.append(["first token, s (best)", *(_figure(value, 2) for value in firsts)])
    if any(one.published for one in results):
        theirs = (", ".join(f"{p.tokens_per_s:g}" for p in one.published) for one in results)
        rows.append([THEIRS, *(value or "-" for value in theirs)])
    return rows


def _seeds_said(results: Sequence[BenchResult]) -> str:
    """Return the protocol, and whose the figures are that stand beside."""
    sources = [
        f"{p.tokens_per_s:g} of {one.served.profile}: {p.source}"
        for one in results
        for p in one.published
    ]
    told = f". Published by others: {'; '.join(dict.fromkeys(sources))}" if sources else ""
    return PROTOCOLS["seeds"] + told


def grid_table(results: Sequence[BenchResult]) -> Rows:
    """Return decode speed by depth and clients."""
    rows = [["tok/s at depth, clients", *names_of(results)]]
    cases = sorted({(c.depth_tokens, c.concurrency) for one in results for c in one.cells})
    for depth, clients in cases:
        cells = [cell_of(one, depth, clients) for one in results]
        speeds = [cell.decode_tokens_per_s if cell else None for cell in cells]
        rows.append([f"{depth}, {clients}", *_against_first(speeds)])
    return rows


def loads_table(results: Sequence[BenchResult]) -> Rows:
    """Return what each case of `vllm bench serve` found."""
    rows = [["prompt, answer, clients", *names_of(results)]]
    keys = sorted(
        {(o.prompt_tokens, o.answer_tokens, o.concurrency) for one in results for o in one.loads}
    )
    figures: tuple[tuple[str, Callable[[Load], float | None], int], ...] = (
        ("tok/s in all", lambda one: one.output_tokens_per_s, 1),
        ("tok/s of one client, after its first token", lambda one: one.decode_tokens_per_s, 1),
        ("prompt tokens/s until the first token", lambda one: one.prefill_tokens_per_s, 0),
        ("first token, ms", lambda one: one.first_token_ms, 0),
    )
    for key in keys:
        found = [{(o.prompt_tokens, o.answer_tokens, o.concurrency): o for o in one.loads}
                 for one in results]  # fmt: skip
        for title, figure, digits in figures:
            values = [figure(one[key]) if key in one else None for one in found]
            rows.append([f"{', '.join(map(str, key))}: {title}", *_against_first(values, digits)])
    return rows


def cell_of(result: BenchResult, depth: int, clients: int) -> Cell | None:
    """Return one case of a result."""
    cells = (c for c in result.cells if (c.depth_tokens, c.concurrency) == (depth, clients))
    return next(cells, None)


def host_table(results: Sequence[BenchResult]) -> Rows:
    """Return memory, heat and acceptance."""
    rows = [["", *names_of(results)]]
    least = [min((s.available_bytes for s in one.samples), default=None) for one in results]
    gigabytes = (value / 1e9 if value is not None else None for value in least)
    rows.append(["least memory available, GB", *(_figure(value, 1) for value in gigabytes)])
    for title, name in (("hottest, °C", "temperature_c"), ("most power, W", "power_w")):
        most = [
            max((v for s in one.samples if (v := getattr(s, name)) is not None), default=None)
            for one in results
        ]
        rows.append([title, *(_figure(value, 0) for value in most)])
    shares = (one.acceptance_fraction for one in results)
    rows.append(["drafts accepted", *("-" if s is None else f"{s:.0%}" for s in shares)])
    return rows


def table(rows: Rows) -> Iterator[str]:
    """Yield a Markdown table."""
    yield "| " + " | ".join(rows[0]) + " |"
    yield "|---" + "|---:" * (len(rows[0]) - 1) + "|"
    for row in rows[1:]:
        yield "| " + " | ".join(row) + " |"
    yield ""


def _against_first(values: Sequence[float | None], digits: int = 1) -> list[str]:
    first, texts = values[0], [_figure(value, digits) for value in values]
    for at, value in enumerate(values[1:], 1):
        if first and value is not None:
            texts[at] += f" ({(value / first - 1) * 100:+.0f} %)"
    return texts


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
