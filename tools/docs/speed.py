"""Tables of the computed speed: comparison with published figures, parts of a step."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from spark_deploy.cli.plan import read_calibration, read_measured_speeds
from spark_deploy.config.catalog.architecture import Architecture
from spark_deploy.config.catalog.model import HybridModel
from spark_deploy.config.catalog.profile import Figure
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.speed import (
    BANDWIDTH_BYTES_PER_S,
    EFFICIENCY,
    FIRST_ACCEPTED,
    HEADS,
    LATER_ACCEPTED,
    LAYER_OVERHEAD_S,
    MAX_DRAFTS,
    PROMPT_FLOPS_PER_S,
    TOLERANCE,
    TURBOQUANT_S,
    compute_speed,
)
from tools.docs.declared import row

Published: TypeAlias = tuple[str, str, Figure, float]
"""Profile, model, figure and its tokens/s."""
# Sources that the page names above the table.
COMMUNITY = r"community (stack of spring 2026 on vLLM 0\.19|report of spring 2026)"
ON_H200 = "[measured](engine-proofs.md#lm-head-kernel) on an H200"
NUMBERS = (
    ("bandwidth", f"{BANDWIDTH_BYTES_PER_S / 1e9:.0f} GB/s", "Spark data sheet"),
    (
        "all kernels except the LM head",
        f"{EFFICIENCY:.0%} of the bandwidth",
        "reported by the community for INT4 (Marlin)",
    ),
    ("constant time per layer", f"{LAYER_OVERHEAD_S * 1e6:.0f} µs", "fitted"),
    (
        "extra time for TurboQuant, per attention layer",
        f"{TURBOQUANT_S * 1e6:.0f} µs",
        "fitted to the only published figure",
    ),
    (
        "prefill compute throughput",
        f"{PROMPT_FLOPS_PER_S / 1e12:.1f} TFLOPS",
        "half of the speed published for two Sparks",
    ),
    *(
        (
            f"LM head `{head}`",
            f"{share:.0%} of the bandwidth",
            "fitted" if head == "keep" else ON_H200,
        )
        for head, share in HEADS.items()
    ),
    (
        "probability that the first draft is accepted",
        str(FIRST_ACCEPTED),
        "published: 95 % accepted with one draft",
    ),
    (
        "probability that a later draft is accepted, if the previous draft was",
        str(LATER_ACCEPTED),
        "published: 80 % accepted with two drafts",
    ),
)


def compared_rows(catalog: Catalog) -> Iterator[str]:
    speeds = ("published, tokens/s", "differences", "computed, tokens/s", "error, %")
    yield from (row("profile", "model", "requests", *speeds), f"|{'---|' * 7}")
    missed = []
    for name, model, figure, published in published_figures(catalog):
        error = error_of(catalog, (name, model, figure, published))
        source = figure.source.replace("not measured by this project", "")
        source = re.sub(COMMUNITY, "", source).strip(" ,;")
        computed = published * (1 + error)
        figures = (f"{published:g}", source, f"{computed:.1f}", f"{100 * error:+.1f}")
        yield row(name, model, figure.requests, *figures)
        missed += [f"{name} with {model}"] if abs(error) > TOLERANCE else []
    estimates = f"Estimates for {', '.join(missed)} are" if missed else "No estimate is"
    yield from ("", f"{estimates} off by more than {100 * TOLERANCE:.0f} %.")


def measured_rows(catalog: Catalog) -> Iterator[str]:
    speeds = list(read_measured_speeds(CHECKOUT, catalog))
    if not speeds:
        yield "There are no reports yet, so `plan` does not correct its estimates."
        return
    yield from (
        row("report", "profile", "model", "measured", "computed", "ratio"),
        f"|{'---|' * 6}",
    )
    for speed in speeds:
        ratio = speed.tokens_per_s / speed.computed_tokens_per_s
        yield row(
            f"[{speed.report_name}](../../reports/{speed.report_name})",
            speed.profile,
            speed.model,
            f"{speed.tokens_per_s:.1f}",
            f"{speed.computed_tokens_per_s:.1f}",
            f"{ratio:.2f}",
        )
    factor = read_calibration(CHECKOUT, catalog).factor
    yield from ("", f"`plan` multiplies by their median, {factor:.2f}.")


def step_rows(catalog: Catalog) -> Iterator[str]:
    model = Settings().model
    names = dict.fromkeys(name for name, of, *_ in published_figures(catalog) if of == model)
    steps = [compute_speed(_shape(catalog, model), catalog.profile(n, model)) for n in names]
    yield from (row("", *names), f"|---|{'---|' * len(names)}")
    for part in dict.fromkeys(part for step in steps for part, _ in step.parts_s):
        yield row(part, *(f"{dict(step.parts_s).get(part, 0.0) * 1000:.1f}" for step in steps))
    yield row("total", *(f"{step.step_s * 1000:.1f}" for step in steps))
    yield row("tokens per step", *(f"{step.tokens_per_step:.2f}" for step in steps))


def default_speed(catalog: Catalog, profile: str) -> float:
    """Return computed tokens/s of the default model for a single request."""
    model = Settings().model
    return compute_speed(_shape(catalog, model), catalog.profile(profile, model)).tokens_per_s


def v3_rows(catalog: Catalog) -> Iterator[str]:
    """Yield the computed step of v2 and of each further part of v3."""
    model = Settings().model
    shape, v2, v3 = _shape(catalog, model), *(catalog.profile(n, model) for n in ("v2", "v3"))
    drafter = replace(v2, drafter=v3.drafter)
    fp32 = replace(v3, options=v2.options)
    parts = {
        "v2": v2,
        "v2 + INT4 drafter": drafter,
        "v2 + INT4 drafter + our INT8 head": replace(drafter, head=v3.head),
        "v2 + INT4 drafter + our INT8 head + draft vocabulary": fp32,
        "v2 + INT4 drafter + our INT8 head + draft vocabulary + BF16 states (= v3)": v3,
    }
    yield from ("| profile | time per step, ms | tokens/s | relative to v2 |", "|---|---|---|---|")
    before = compute_speed(shape, v2).tokens_per_s
    for name, profile in parts.items():
        speed = compute_speed(shape, profile)
        gain = f"{speed.tokens_per_s / before:.3f}"
        yield row(name, f"{speed.step_s * 1000:.1f}", f"{speed.tokens_per_s:.1f}", gain)


def depth_rows(catalog: Catalog) -> Iterator[str]:
    """Yield the computed speed of v3 by requests and drafts."""
    shape, v3 = _shape(catalog, Settings().model), catalog.profile("v3", Settings().model)
    assert v3.speculation is not None
    always = replace(v3.speculation, num_speculative_tokens_per_batch_size=None)
    drafts = range(MAX_DRAFTS + 1)
    yield from (row("requests", *map(_drafts, drafts)), f"|---|{'---|' * len(drafts)}")
    for requests in range(1, v3.limits.max_sequences + 1):
        chosen = [replace(always, tokens=count) if count else None for count in drafts]
        speeds = [
            compute_speed(shape, replace(v3, speculation=choice), requests=requests).tokens_per_s
            for choice in chosen
        ]
        yield row(requests, *(f"{speed:.1f}" for speed in speeds))


def break_even_rows(catalog: Catalog) -> Iterator[str]:
    """Yield the share of drafts that v3's draft vocabulary must contain to raise the speed."""
    shape, v3 = _shape(catalog, Settings().model), catalog.profile("v3", Settings().model)
    assert v3.speculation is not None
    all_tokens = replace(v3, speculation=replace(v3.speculation, draft_vocabulary_tokens=None))
    few, every = compute_speed(shape, v3), compute_speed(shape, all_tokens)
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        share = (low + high) / 2
        accepted = sum(
            FIRST_ACCEPTED * LATER_ACCEPTED**draft * share ** (draft + 1)
            for draft in range(v3.speculation.draft_tokens(1))
        )
        slower = (1 + accepted) / few.step_s < every.tokens_per_s
        low, high = (share, high) if slower else (low, share)
    percent = f"{100 * high:.0f} %"
    yield f"If fewer than {percent} of the drafts that the model would accept are among its tokens,"
    yield "`v3` is faster with `engine.draft_vocabulary_tokens: 0` (computed for one request)."


def _drafts(count: int) -> str:
    return f"{count or 'no'} draft{'' if count == 1 else 's'}"


def number_rows() -> Iterator[str]:
    yield from ("| constant | value | source |", "|---|---|---|")
    yield from (row(*cells) for cells in NUMBERS)


def _shape(catalog: Catalog, name: str) -> Architecture:
    model = catalog.model(name)
    assert isinstance(model, HybridModel), f"{name}: published figures need a hybrid model"
    return model.architecture


def error_of(catalog: Catalog, published: Published) -> float:
    name, model, figure, tokens_per_s = published
    profile = catalog.profile(name, model)
    computed = compute_speed(_shape(catalog, model), profile, requests=figure.requests)
    return computed.tokens_per_s / tokens_per_s - 1


def published_figures(catalog: Catalog) -> list[Published]:
    rows = [
        (name, figure.model, figure, figure.tokens_per_s)
        for name in catalog.profile_names
        for figure in catalog.profile(name, Settings().model).published
        if figure.model and figure.tokens_per_s
    ]
    return sorted(rows, key=lambda row: (row[2].requests, row[1], row[3]))
