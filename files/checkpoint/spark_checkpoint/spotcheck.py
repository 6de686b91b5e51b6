"""Proves that donor bytes are the base's own weights in FP8, module by module.

A swapped pair of projections, another layer's tensor, a turned scale or zeroed bytes all have
the right names, dtypes and shapes. They differ in value: rounding to e4m3 moves a weight by
about 2.6 % (root mean square), anything else by far more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.numbers import block_sums, dequantise, numpy

if TYPE_CHECKING:
    from spark_checkpoint.numbers import Codes, Floats

MODULE_LIMIT = 0.04
# One block has fewer elements and so a wider spread than the module's mean.
BLOCK_LIMIT = 0.08


class Error(NamedTuple):
    """Relative errors (root of squared error over squared weight)."""

    module: float
    worst_block: float


def error_between(weights: Floats, stand_in: Floats, block: tuple[int, int]) -> Error:
    """Return how far ``stand_in`` is from ``weights``, as a whole and in its worst block."""
    np: Any = numpy()
    lost = block_sums(np.square(stand_in - weights), block).astype(np.float64)
    power = block_sums(np.square(weights), block).astype(np.float64)
    blank = power == 0
    by_block = np.sqrt(lost / np.where(blank, 1, power))
    by_block = np.where(blank & (lost > 0), np.inf, by_block)
    total = power.sum()
    module = float(np.sqrt(lost.sum() / total)) if total > 0 else float(by_block.max())
    return Error(module, float(by_block.max()))


def check_module(
    module: str, weights: Floats, codes: Codes, scales: Floats, block: tuple[int, int]
) -> Error:
    """Refuse a donor module that is not the FP8 form of ``weights``."""
    np: Any = numpy()
    fix = "use the donor and base of one model, at the locked commits"
    if not np.isfinite(scales).all() or not (scales > 0).all():
        raise GateRefused(module, "donor scales are not all finite and above zero", fix)
    if ((codes & 0x7F) == 0x7F).any():
        raise GateRefused(module, "donor weight holds NaN codes", fix)
    if not codes.any():
        raise GateRefused(module, "donor weight is all zero", fix)
    error = error_between(weights, dequantise(codes, scales, block), block)
    # Written so that a NaN is refused too.
    if not (error.module <= MODULE_LIMIT and error.worst_block <= BLOCK_LIMIT):
        raise GateRefused(
            module,
            f"donor differs from the base's own weight by {error.module:.1%} "
            f"(worst block {error.worst_block:.1%}); FP8 rounding is about 2.6%, "
            f"accepted are {MODULE_LIMIT:.0%} and {BLOCK_LIMIT:.0%}",
            fix,
        )
    return error
