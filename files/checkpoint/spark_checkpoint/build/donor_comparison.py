"""Check that the FP8 source checkpoint (donor) holds the base's own weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.numbers import Codes, Floats, block_sums, from_e4m3

MODULE_LIMIT = 0.04
# One block has fewer elements and so a wider spread than the module's mean.
BLOCK_LIMIT = 0.08
# Half a step of 3 mantissa bits, plus what a scale loses that was stored in BF16 afterwards.
_ROUNDING = 2.0**-4 + 2.0**-7
# Half the smallest step, in units of the block's scale, with the same allowance.
_SMALLEST = 2.0**-10 * (1 + 2.0**-3)
# Blocks of a row compared at once: their float32 copies stay small and in the processor's cache.
_BLOCKS = 8
_FIX = "use the donor and base of one model, at the locked commits"


class Error(NamedTuple):
    """How far FP8 weights are from the weights they stand for.

    ``module`` and ``worst_block`` are relative errors (root of squared error over squared
    weight); ``beyond`` counts elements further off than rounding explains.
    """

    module: float
    worst_block: float
    beyond: int


class Comparison:
    """Compares FP8 block weights with the weights, one row of blocks at a time."""

    def __init__(self, scales: Floats, block: tuple[int, int]):
        self._scales, self._block = scales, block
        self._lost: list[Any] = []
        self._power: list[Any] = []
        self._beyond = 0
        self.any_nonzero = False
        self.any_nan = False

    def add(self, weights: Floats, codes: Codes) -> None:
        """Take the next row of blocks: ``block[0]`` rows, or fewer at the end."""
        scales, width = self._scales[len(self._lost)], self._block[1]
        lost: list[Any] = []
        power: list[Any] = []
        for first in range(0, len(scales), _BLOCKS):
            columns = slice(first * width, (first + _BLOCKS) * width)
            part = weights[:, columns]
            scale = np.repeat(scales[first : first + _BLOCKS], width)[: part.shape[1]]
            sums = self._compare(part, codes[:, columns], scale)
            lost.append(sums[0])
            power.append(sums[1])
        self._lost.append(np.concatenate(lost))
        self._power.append(np.concatenate(power))

    def _compare(self, weights: Floats, codes: Codes, scale: Floats) -> tuple[Any, Any]:
        """Count what is beyond rounding; return the sums of squares of each block."""
        # In place: fresh arrays of this size cost more than what is computed in them.
        error, power = from_e4m3(codes), np.abs(weights)
        error *= scale
        error -= weights
        np.abs(error, out=error)
        allowed = np.maximum(power * np.float32(_ROUNDING), scale * np.float32(_SMALLEST))
        # A NaN is beyond every bound.
        self._beyond += int(error.size - np.count_nonzero(error <= allowed))
        self.any_nonzero = self.any_nonzero or bool(codes.any())
        self.any_nan = self.any_nan or bool(((codes & 0x7F) == 0x7F).any())
        return (
            block_sums(np.square(error, out=error), self._block)[0],
            block_sums(np.square(power, out=power), self._block)[0],
        )

    def error(self) -> Error:
        lost, power = np.array(self._lost, np.float64), np.array(self._power, np.float64)
        blank = power == 0
        by_block = np.sqrt(lost / np.where(blank, 1, power))
        worst = float(np.where(blank & (lost > 0), np.inf, by_block).max())
        total = power.sum()
        module = float(np.sqrt(lost.sum() / total)) if total > 0 else worst
        return Error(module, worst, self._beyond)


def check_scales(module: str, scales: Floats) -> None:
    if not np.isfinite(scales).all() or not (scales > 0).all():
        raise GateRefused(module, "donor scales are not all finite and above zero", _FIX)


def check_module(module: str, comparison: Comparison) -> Error:
    """Refuse a donor module that is not the FP8 form of the base's weight."""
    if comparison.any_nan:
        raise GateRefused(module, "donor weight holds NaN codes", _FIX)
    if not comparison.any_nonzero:
        raise GateRefused(module, "donor weight is all zero", _FIX)
    error = comparison.error()
    # Written so that a NaN is refused too.
    if not (error.module <= MODULE_LIMIT and error.worst_block <= BLOCK_LIMIT):
        raise GateRefused(
            module,
            f"donor differs from the base's own weight by {error.module:.1%} "
            f"(worst block {error.worst_block:.1%}); FP8 rounding is about 2.6%, "
            f"accepted are {MODULE_LIMIT:.0%} and {BLOCK_LIMIT:.0%}",
            _FIX,
        )
    return error


def check_outliers(errors: Mapping[str, Error]) -> None:
    """Refuse modules with damaged elements when the others show that there should be none.

    A donor made from exactly the base's weights has no element beyond rounding. One made from
    slightly other weights has some in nearly every module; then the means above must do.
    """
    damaged = {module: error.beyond for module, error in errors.items() if error.beyond}
    if not damaged or len(damaged) * 10 > len(errors):
        return
    module, count = max(damaged.items(), key=lambda item: item[1])
    raise GateRefused(
        module,
        f"{count} donor elements are further from the base than rounding can put them, while "
        f"{len(errors) - len(damaged)} of {len(errors)} modules have none: damaged bytes",
        "fetch the donor again",
    )
