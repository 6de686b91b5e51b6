"""The speed model's errors for figures left out of its fit, and with an H100's LM heads."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np

from spark_deploy.config.catalog.architecture import Architecture
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.plan import speed
from tools.docs.speed import default_speed, published_figures, shape_of

KERNELS = {"int8-g128": "marlin", "int8-triton": "own"}
"""Name of each LM head's kernel in the result file."""
GAUSS_NEWTON_STEPS = 8
WIDTH = 128


@dataclass(frozen=True, slots=True)
class Published:
    name: str
    model: str
    shape: Architecture
    profile: Profile
    requests: int
    tokens_per_s: float

    def error(self) -> float:
        computed = speed.compute_speed(self.shape, self.profile, requests=self.requests)
        return computed.tokens_per_s / self.tokens_per_s - 1


def left_out_rows(catalog: Catalog) -> Iterator[str]:
    figures = read_figures(catalog)
    missed = []
    for figure in figures:
        with fitted(fit([other for other in figures if other is not figure])):
            missed.append((100 * figure.error(), f"`{figure.name}` of {figure.model}"))
    first, second, (third, _), *_ = sorted(missed, key=lambda item: -abs(item[0]))
    named = " and ".join(f"{error:+.1f} % for {name}" for error, name in (first, second))
    yield from textwrap.wrap(
        f"If we leave a figure out of the fit, the estimate misses it by {named}, and by at most "
        f"{abs(third):.1f} % for the others.",
        WIDTH,
    )


def h100_rows(catalog: Catalog) -> Iterator[str]:
    figures = read_figures(catalog)
    with mock.patch.dict(speed.HEADS, _read_h100_efficiencies()), fitted(fit(figures)):
        v2, v3 = (default_speed(catalog, name) for name in ("v2", "v3"))
        largest = max(abs(figure.error()) for figure in figures)
    yield from textwrap.wrap(
        "With the efficiencies that we measured for both INT8 heads on an H100, and a new fit, "
        f"`v2` reaches {v2:.1f} tokens/s and `v3` {v3:.1f} ({v3 / v2:.2f} times `v2`; largest "
        f"error of the published figures {100 * largest:.1f} %).",
        WIDTH,
    )


def head_gain_rows(catalog: Catalog) -> Iterator[str]:
    before, after = (default_speed(catalog, name) for name in ("hybrid-mtp2", "v2"))
    yield from textwrap.wrap(
        f"The INT8 head raises the computed speed from {before:.1f} to {after:.1f} tokens/s "
        f"(+{100 * (after / before - 1):.0f} %). The published gain, from 38.4 to 51, is 33 %. We "
        "do not know the reason for the difference, but one source gives 38.4 for a single draft, "
        "and then the published speeds differ in more than the head.",
        WIDTH,
    )


def fit(figures: Sequence[Published]) -> np.ndarray:
    """Return the time per layer and the head's efficiency with the least squared errors."""
    start = np.array([speed.LAYER_OVERHEAD_S, speed.HEADS["keep"]])
    factors = np.ones(2)
    for _ in range(GAUSS_NEWTON_STEPS):
        errors = _errors(figures, start * factors)
        slopes = [
            (_errors(figures, start * (factors + change)) - errors) / 1e-5
            for change in 1e-5 * np.eye(2)
        ]
        factors -= np.linalg.lstsq(np.transpose(slopes), errors, rcond=None)[0]
    return start * factors


@contextmanager
def fitted(constants: np.ndarray) -> Iterator[None]:
    overhead_s, head = map(float, constants)
    with (
        mock.patch.object(speed, "LAYER_OVERHEAD_S", overhead_s),
        mock.patch.dict(speed.HEADS, {"keep": head}),
    ):
        yield


def _errors(figures: Sequence[Published], constants: np.ndarray) -> np.ndarray:
    with fitted(constants):
        return np.array([figure.error() for figure in figures])


def read_figures(catalog: Catalog) -> list[Published]:
    """Return all published figures except v2-tq's, which has a constant of its own."""
    return [
        Published(
            name,
            model,
            shape_of(catalog, model),
            catalog.profile(name, model),
            figure.requests,
            tokens_per_s,
        )
        for name, model, figure, tokens_per_s in published_figures(catalog)
        if name != "v2-tq"
    ]


def _read_h100_efficiencies() -> dict[str, float]:
    result = json.loads((CHECKOUT / "proofs/results/gpu/lm-head-h100.json").read_text())
    [shape] = [s for s in result["shapes"] if (s["rows"], s["inputs"]) == (248320, 3072)]
    read_us = (
        (shape["int8_bytes"] + shape["scale_bytes"]) / shape["read_gb_per_s"]["long_read"] / 1e3
    )
    return {head: read_us / shape["us"][kernel]["1"] for head, kernel in KERNELS.items()}
