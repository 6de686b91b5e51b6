"""Compare FP8 weights with those of the base, and FP8 scales with each other."""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from spark_checkpoint.errors import ValidationError
from spark_checkpoint.number_formats import Codes, Floats, from_e4m3, reduce_blocks

# Relative error: half a step of 3 mantissa bits, and rounding of the scale to BF16.
_RELATIVE_ROUNDING = 2.0**-4 + 2.0**-7
# Absolute error in units of the block's scale: half the smallest step, and rounding of the scale.
_ABSOLUTE_ROUNDING = 2.0**-10 * (1 + 2.0**-3)
# Blocks of a row to compare at once; float32 copies of them fit in the processor's cache.
_BLOCKS_AT_ONCE = 8
# Limits of a block scale relative to the median of the same module in all experts and layers; the
# plugin has the same limits.
_MIN_RATIO, _MAX_RATIO = 1 / 1024, 128


class Deviation(NamedTuple):
    module_error: float
    worst_block_error: float
    beyond_rounding: int  # number of elements whose error exceeds rounding


class Comparison:
    """Compares FP8 codes with float32 weights, by rows of blocks."""

    def __init__(self, scales: Floats, block: tuple[int, int]):
        self._scales, self._block = scales, block
        self._errors: list[Any] = []
        self._power: list[Any] = []
        self._beyond_rounding = 0
        self.any_nonzero = False
        self.any_nan = False

    def add(self, weights: Floats, codes: Codes) -> None:
        scales, width = self._scales[len(self._errors)], self._block[1]
        errors: list[Any] = []
        powers: list[Any] = []
        for first in range(0, len(scales), _BLOCKS_AT_ONCE):
            columns = slice(first * width, (first + _BLOCKS_AT_ONCE) * width)
            part = weights[:, columns]
            scale = np.repeat(scales[first : first + _BLOCKS_AT_ONCE], width)[: part.shape[1]]
            error, power = self._compare(part, codes[:, columns], scale)
            errors.append(error)
            powers.append(power)
        self._errors.append(np.concatenate(errors))
        self._power.append(np.concatenate(powers))

    def _compare(self, weights: Floats, codes: Codes, scale: Floats) -> tuple[Any, Any]:
        """Count elements beyond rounding; return the squared errors and weights of each block."""
        # In place, because allocating large arrays takes longer than the arithmetic.
        error, power = from_e4m3(codes), np.abs(weights)
        error *= scale
        error -= weights
        np.abs(error, out=error)
        allowed = np.maximum(
            power * np.float32(_RELATIVE_ROUNDING), scale * np.float32(_ABSOLUTE_ROUNDING)
        )
        self._beyond_rounding += int(error.size - np.count_nonzero(error <= allowed))
        self.any_nonzero = self.any_nonzero or bool(codes.any())
        self.any_nan = self.any_nan or bool(((codes & 0x7F) == 0x7F).any())
        return (
            reduce_blocks(np.add, np.square(error, out=error), self._block)[0],
            reduce_blocks(np.add, np.square(power, out=power), self._block)[0],
        )

    def deviation(self) -> Deviation:
        errors, power = np.array(self._errors, np.float64), np.array(self._power, np.float64)
        is_zero = power == 0
        by_block = np.sqrt(errors / np.where(is_zero, 1, power))
        worst_block = float(np.where(is_zero & (errors > 0), np.inf, by_block).max())
        total = power.sum()
        module_error = float(np.sqrt(errors.sum() / total)) if total > 0 else worst_block
        return Deviation(module_error, worst_block, self._beyond_rounding)


def check_outliers(deviations: Mapping[str, Deviation]) -> None:
    """Raise ValidationError if only a few modules have elements beyond rounding: they are damaged.

    A donor made from slightly different weights has such elements in nearly every module.
    """
    damaged = {
        module: deviation.beyond_rounding
        for module, deviation in deviations.items()
        if deviation.beyond_rounding
    }
    if not damaged or len(damaged) * 10 > len(deviations):
        return
    module, count = max(damaged.items(), key=lambda item: item[1])
    problem = (
        f"{count} donor elements differ from the base by more than rounding errors; only "
        f"{len(damaged)} of {len(deviations)} modules contain such elements, so the file is damaged"
    )
    raise ValidationError(module, problem, "download the donor again")


def check_scale_sizes(scales: Mapping[str, Floats]) -> None:
    """Raise ValidationError for implausible scales; ``scales`` maps weights to used scales."""
    groups: dict[str, dict[str, Floats]] = defaultdict(dict)
    for name, values in scales.items():
        groups[re.sub(r"\.\d+\.", ".N.", name)][name] = values
    for group in groups.values():
        median = float(np.median(np.concatenate(list(group.values()))))
        for name, values in group.items():
            wrong = values[(values < _MIN_RATIO * median) | (values > _MAX_RATIO * median)]
            if wrong.size:
                problem = (
                    f"has a scale of {wrong[0]:g}, but the median of similar modules is {median:g}"
                )
                fix = "download the donor again, or use the FP8 repository of the same model"
                raise ValidationError(f"donor {name}", problem, fix)
