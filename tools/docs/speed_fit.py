"""The speed model's errors for figures left out of its fit, and with an H100's LM heads."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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
    figures = _read_figures(catalog)
    errors = {}
    for figure in figures:
        with fit([other for other in figures if other is not figure]):
            errors[f"`{figure.name}` of {figure.model}"] = 100 * figure.error()
    largest = sorted(errors, key=lambda name: -abs(errors[name]))[:3]
    missed = " and ".join(f"{errors[name]:+.1f} % for {name}" for name in largest[:2])
    yield f"If we leave a figure out of the fit, the estimate misses it by {missed},"
    yield f"and by at most {abs(errors[largest[2]]):.1f} % for the others."


def h100_rows(catalog: Catalog) -> Iterator[str]:
    figures = _read_figures(catalog)
    with mock.patch.dict(speed.HEADS, _read_h100_efficiencies()), fit(figures):
        v2, v3 = (default_speed(catalog, name) for name in ("v2", "v3"))
        largest = max(abs(figure.error()) for figure in figures)
    yield "With the efficiencies that we measured for both INT8 heads on an H100, and a new fit,"
    yield f"`v2` reaches {v2:.1f} tokens/s and `v3` {v3:.1f} ({v3 / v2:.2f} times `v2`; largest"
    yield f"error of the published figures {100 * largest:.1f} %)."


def head_gain_rows(catalog: Catalog) -> Iterator[str]:
    before, after = (default_speed(catalog, name) for name in ("hybrid-mtp2", "v2"))
    yield f"The INT8 head raises the computed speed from {before:.1f} to {after:.1f} tokens/s"
    yield f"(+{100 * (after / before - 1):.0f} %). The published gain is 33 % (38.4 to 51); we"
    yield "cannot explain the rest."


def fit(figures: Sequence[Published]) -> ExitStack:
    """Set the fitted constants by least squares of the relative errors, until the context ends."""
    start = np.array([speed.LAYER_OVERHEAD_S, speed.HEADS["keep"]])
    factors = np.ones(2)
    for _ in range(GAUSS_NEWTON_STEPS):
        errors = _errors(figures, start * factors)
        slopes = [
            (_errors(figures, start * (factors + change)) - errors) / 1e-5
            for change in 1e-5 * np.eye(2)
        ]
        factors -= np.linalg.lstsq(np.transpose(slopes), errors, rcond=None)[0]
    return _constants(start * factors)


def _errors(figures: Sequence[Published], constants: np.ndarray) -> np.ndarray:
    with _constants(constants):
        return np.array([figure.error() for figure in figures])


def _constants(values: np.ndarray) -> ExitStack:
    overhead_s, head = map(float, values)
    patches = ExitStack()
    patches.enter_context(mock.patch.object(speed, "LAYER_OVERHEAD_S", overhead_s))
    patches.enter_context(mock.patch.dict(speed.HEADS, {"keep": head}))
    return patches


def _read_figures(catalog: Catalog) -> list[Published]:
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
