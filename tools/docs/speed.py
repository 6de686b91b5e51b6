"""The page of the computed speed: published figures beside it, and what it is made of."""

from __future__ import annotations

from collections.abc import Iterator

from spark_deploy.catalog.model import Architecture, HybridModel
from spark_deploy.catalog.profile import Figure
from spark_deploy.catalog.types import Catalog
from spark_deploy.checkout import CHECKOUT
from spark_deploy.cli.planned.recalibrated import calibration, files_of, measured
from spark_deploy.planning.budget.speed import (
    BANDWIDTH_BYTES_PER_S,
    FIRST_ACCEPTED,
    HEADS,
    LARGE_INT4,
    LATER_ACCEPTED,
    LAYER_S,
    SMALL,
    TOLERANCE,
    speed_of,
)
from spark_deploy.settings.types import Settings
from tools.docs.declared import cell

BEFORE = """
`plan` says how fast a pair would stream, before anything is downloaded. It is arithmetic, and was
measured on no Spark: a step of decoding waits for memory, so its time is the bytes that it reads
over the bandwidth, with one efficiency for each kind of kernel and a time for each layer. Two
numbers were fitted, on the first two stages of the published ladder; all other rows are
forecasts. The published figures are others', each with its stack, and were measured by nobody
here. `plan` prints the range of 15 % around what is computed.
"""
UNKNOWN = """
What the arithmetic does not know: how often the tokens of one step choose the same experts (it
takes them as independent, which makes drafts and many requests look dearer than they are), what a
TurboQuant cache costs to pack and unpack, which attention backend runs, how often drafts are
accepted for a given kind of text, the time of prompts, and anything of two Sparks. The published
v2 had a head kernel that takes longer for three tokens than ours, and FlashInfer attention.
"""
LEFT_OUT = """
## Published, and not computed

The larger published table of several requests at once is of *two* Sparks that serve one INT4 tree
together (community stack of spring 2026, measured by llama-benchy, tokens/s of all requests; no
measurement of this project). No row of it is computed: each layer waits for the other Spark, over
a network and with an executor (Ray, or the engine's own) whose times nobody has told, and the
arithmetic above has no place for them. Where there are drafts the table counts pieces of the
stream, of which one may hold several tokens, so those columns are nearer to steps than to tokens.
"""
TWO_SPARKS = (
    ("prompts of 2048 tokens, 1 request", 3317, 3295, 3329, 3382),
    ("128 tokens, 1 request", 19.9, 25.6, 33.3, 42.9),
    ("128 tokens, 2 requests", 34.5, 41.9, 53.1, 69.8),
    ("128 tokens, 5 requests", 40.3, 52.0, 90.4, 82.7),
    ("128 tokens behind 32,768, 1 request", 19.3, 17.0, 37.3, 40.2),
    ("128 tokens behind 32,768, 5 requests", 7.4, 24.0, 62.3, 52.8),
)
"""By case: Ray with two drafts, with one, without; the engine's own executor without."""
OF_TEXTS = "the arithmetic knows no kinds of text"
OTHERS = (
    ("base, five kinds of text", "27.3 to 28.4", OF_TEXTS),
    ("hybrid, five kinds of text", "29.7 to 31.0", OF_TEXTS),
    ("hybrid-mtp1, five kinds of text", "36.3 to 39.9", OF_TEXTS),
    ("analysis of documents with a community image", "32 to 35, 22 before",
     "neither image nor settings were told"),
    ("NVFP4", "16.6, later 26 to 28 with three drafts",
     "a format that [is refused here](profiles.md#guard-rails)"),
)  # fmt: skip
OTHERS_BEFORE = """Others, of one Spark; the first three of the stack that
[profiles.md](profiles.md) tells beside these stages, of the other two none was told:"""
SPARKS = """
A deploy measures one request, and `spark-deploy report` tells it. `plan` multiplies what it
computes by the median of measured over computed, of the reports in `reports/` and of those beside
an inventory (`spark-report-*.md`, or `reports/*.md`); then it says by how many.
"""
ON_H200 = (
    "[measured](../../proofs/engine-proofs.md#lm-head-kernel) on an H200, of its own bandwidth: "
    "3072 inputs, one token, between both floors"
)
NUMBERS = (
    ("bandwidth", f"{BANDWIDTH_BYTES_PER_S / 1e9:.0f} GB/s", "data sheet of a Spark"),
    ("INT4 kernels", f"{LARGE_INT4} of it", "reported of Marlin by the community"),
    ("states, cache", f"{LARGE_INT4} of it", "taken as INT4 kernels"),
    ("shared experts, routers, drafter", f"{SMALL} of it", "fitted"),
    ("each layer", f"{LAYER_S * 1e6:.0f} µs", "fitted"),
    *((f"LM head, {head}", f"{share} of it", ON_H200) for head, share in HEADS.items()),
    ("first draft accepted", str(FIRST_ACCEPTED), "published: 95 % of one"),
    ("each later one, after the one before", str(LATER_ACCEPTED), "published: 80 % of two"),
)


def speed_page(catalog: Catalog) -> Iterator[str]:
    """Yield the page."""
    yield "<!-- generated from catalog/profiles by `make docs` -->"
    yield "# Computed speed"
    yield BEFORE
    yield from _compared(catalog)
    yield ""
    yield from _sparks(catalog)
    yield from _steps(catalog)
    yield from ("", "## Numbers in it", "", "| number | value | from |", "|---|---|---|")
    for row in NUMBERS:
        yield f"| {' | '.join(row)} |"


def _compared(catalog: Catalog) -> Iterator[str]:
    yield "| profile, model | requests | published | on | computed | error |"
    yield "|---|---|---|---|---|---|"
    missed = []
    for name, model, figure, published in _published(catalog):
        shape, profile = _shape(catalog, model), catalog.profile(name, model)
        found = speed_of(shape, profile, requests=figure.requests).tokens_per_s
        error = found / published - 1
        told = f"{error:+.1%}" + (" (fitted)" if figure.fitted else "")
        begun = f"| {name}, {model} | {figure.requests} | {published:g} | {cell(figure.source)}"
        yield f"{begun} | {found:.1f} | {told} |"
        missed += [f"{name}, {model}"] if abs(error) > TOLERANCE else []
    yield ""
    yield f"More than {TOLERANCE:.0%} off: {', '.join(missed) or 'none'}."
    yield UNKNOWN.rstrip()
    yield from _left_out()


def _left_out() -> Iterator[str]:
    """Yield what is published and nothing here computes."""
    yield LEFT_OUT
    yield "| two Sparks | Ray, two drafts | Ray, one | Ray, none | own executor, none | computed |"
    yield "|---|---|---|---|---|---|"
    for case, *figures in TWO_SPARKS:
        told = (str(figure) for figure in figures)
        yield f"| {case} | {' | '.join(told)} | not computed |"
    yield from ("", OTHERS_BEFORE, "")
    yield from ("| what | tokens/s published | not computed, since |", "|---|---|---|")
    for row in OTHERS:
        yield f"| {' | '.join(row)} |"


def _sparks(catalog: Catalog) -> Iterator[str]:
    """Yield what reports of Sparks measured beside what is computed."""
    yield from ("## What Sparks measured", "", SPARKS.strip(), "")
    found = list(measured(files_of(CHECKOUT), catalog))
    if not found:
        yield from ("No report is here yet, so nothing is moved.", "")
        return
    yield "| report | profile, model | measured | computed | |"
    yield "|---|---|---|---|---|"
    for one in found:
        link = f"[{one.report}](../../reports/{one.report})"
        apart = one.tokens_per_s / one.computed_tokens_per_s
        begun = f"| {link} | {one.profile}, {one.model} | {one.tokens_per_s:.1f}"
        yield f"{begun} | {one.computed_tokens_per_s:.1f} | times {apart:.2f} |"
    moved = calibration(CHECKOUT, catalog)
    yield from ("", f"`plan` multiplies by their median, {moved.factor:.2f}.", "")


def _steps(catalog: Catalog) -> Iterator[str]:
    model = Settings().model
    names = dict.fromkeys(name for name, of, *_ in _published(catalog) if of == model)
    steps = [speed_of(_shape(catalog, model), catalog.profile(n, model)) for n in names]
    yield from ("## Where the time of a step goes", "")
    yield f"{model}, one request at the beginning of its context, milliseconds."
    yield from ("", f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}")
    for part in dict.fromkeys(part for step in steps for part, _ in step.parts_s):
        times = (dict(step.parts_s).get(part, 0.0) * 1000 for step in steps)
        yield f"| {part} | {' | '.join(f'{ms:.1f}' for ms in times)} |"
    yield f"| step | {' | '.join(f'{step.step_s * 1000:.1f}' for step in steps)} |"
    yield f"| tokens of a step | {' | '.join(f'{step.tokens_per_step:.2f}' for step in steps)} |"


def _shape(catalog: Catalog, name: str) -> Architecture:
    model = catalog.model(name)
    assert isinstance(model, HybridModel), f"{name}: figures are published of ours alone"
    return model.architecture


def _published(catalog: Catalog) -> list[tuple[str, str, Figure, float]]:
    """Return profile, model, figure and its number, in the order of the numbers."""
    found = [
        (name, figure.model, figure, figure.tokens_per_s)
        for name in catalog.profile_names
        for figure in catalog.profile(name, Settings().model).published
        if figure.model and figure.tokens_per_s
    ]
    return sorted(found, key=lambda one: (one[2].requests, one[1], one[3]))
