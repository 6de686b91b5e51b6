"""The speed model's errors for figures left out of its fit, and with an H100's LM heads."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np

from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.plan import speed
from tools.docs.speed import Published, default_speed, error_of, published_figures

KERNELS = {"int8-g128": "marlin", "int8-triton": "own"}
"""Name of each LM head's kernel in the result file."""
GAUSS_NEWTON_STEPS = 8
WIDTH = 128


def left_out_rows(catalog: Catalog) -> Iterator[str]:
    figures = fitted_figures(catalog)
    missed = []
    for figure in figures:
        with constants(fit(catalog, [other for other in figures if other is not figure])):
            missed.append((100 * error_of(catalog, figure), f"`{figure[0]}` of {figure[1]}"))
    first, second, (third, _), *_ = sorted(missed, key=lambda item: -abs(item[0]))
    named = " and ".join(f"{error:+.1f} % for {name}" for error, name in (first, second))
    yield from textwrap.wrap(
        f"If we leave a figure out of the fit, the estimate misses it by {named}, and by at most "
        f"{abs(third):.1f} % for the others.",
        WIDTH,
    )


def h100_rows(catalog: Catalog) -> Iterator[str]:
    figures = fitted_figures(catalog)
    heads = mock.patch.dict(speed.HEADS, _read_h100_efficiencies())
    with heads, constants(fit(catalog, figures)):
        v2, v3 = (default_speed(catalog, name) for name in ("v2", "v3"))
        largest = max(abs(error_of(catalog, figure)) for figure in figures)
    yield from textwrap.wrap(
        "With the efficiencies that we measured for both INT8 heads on an H100, and a new fit, "
        f"`v2` reaches {v2:.1f} tokens/s and `v3` {v3:.1f} ({v3 / v2:.2f} times `v2`; largest "
        f"error of the published figures {100 * largest:.1f} %).",
        WIDTH,
    )


def head_gain_rows(catalog: Catalog) -> Iterator[str]:
    before, after = (default_speed(catalog, name) for name in ("hybrid-mtp2", "v2"))
    yield (
        f"The INT8 head raises the computed speed from {before:.1f} to {after:.1f} tokens/s "
        f"(+{100 * (after / before - 1):.0f} %)."
    )


def fit(catalog: Catalog, figures: Sequence[Published]) -> np.ndarray:
    """Return the time per layer and the head's efficiency with the least squared errors."""

    def errors(factors: np.ndarray) -> np.ndarray:
        with constants(start * factors):
            return np.array([error_of(catalog, figure) for figure in figures])

    start = np.array([speed.LAYER_OVERHEAD_S, speed.HEADS["keep"]])
    factors = np.ones(2)
    for _ in range(GAUSS_NEWTON_STEPS):
        now = errors(factors)
        slopes = [(errors(factors + change) - now) / 1e-5 for change in 1e-5 * np.eye(2)]
        factors -= np.linalg.lstsq(np.transpose(slopes), now, rcond=None)[0]
    return start * factors


@contextmanager
def constants(values: np.ndarray) -> Iterator[None]:
    """Compute speeds with this time per layer and efficiency of the head."""
    overhead_s, head = map(float, values)
    layers = mock.patch.object(speed, "LAYER_OVERHEAD_S", overhead_s)
    with layers, mock.patch.dict(speed.HEADS, {"keep": head}):
        yield


def fitted_figures(catalog: Catalog) -> list[Published]:
    """Return all published figures except v2-tq's, which has a constant of its own."""
    return [figure for figure in published_figures(catalog) if figure[0] != "v2-tq"]


def _read_h100_efficiencies() -> dict[str, float]:
    result = json.loads((CHECKOUT / "proofs/results/gpu/lm-head-h100.json").read_text())
    [shape] = [s for s in result["shapes"] if (s["rows"], s["inputs"]) == (248320, 3072)]
    size_bytes = shape["int8_bytes"] + shape["scale_bytes"]
    read_us = size_bytes / shape["read_gb_per_s"]["long_read"] / 1e3
    return {head: read_us / shape["us"][kernel]["1"] for head, kernel in KERNELS.items()}
