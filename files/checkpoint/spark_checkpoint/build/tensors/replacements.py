"""Makes the tensors that replace the base's: FP8 and INT8.

Weights are read and compared one row of blocks at a time, so memory stays at a few megabytes
for each worker whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from spark_checkpoint.build.staging import Changes, NewTensor, Staging, pieces_of_span, read_span
from spark_checkpoint.build.tensors.packing import pack_weight
from spark_checkpoint.build.tensors.spotcheck import (
    Comparison,
    Error,
    check_module,
    check_outliers,
    check_scales,
)
from spark_checkpoint.format.index import Tensor
from spark_checkpoint.format.numbers import (
    Floats,
    dequantise,
    floats,
    from_bf16_bits,
    quantise_blocks,
)
from spark_checkpoint.format.tree import Span, Tree
from spark_checkpoint.progress import Progress
from spark_checkpoint.storage import WORKERS
from spark_checkpoint.verify.gates import FP8, SCALE, WEIGHT, scale_of

_T = TypeVar("_T")


def fp8_rows(span: Span, scales: Floats, columns: int, block: tuple[int, int]) -> Iterator[Floats]:
    """Yield an FP8 matrix as float32, one row of blocks at a time."""
    for number, raw in enumerate(pieces_of_span(span, max(1, columns * block[0]))):
        codes = np.frombuffer(raw, np.uint8).reshape(-1, columns)
        yield dequantise(codes, scales[number : number + 1], block)


def _weight_rows(base: Tree, name: str, block: tuple[int, int]) -> Iterator[Floats]:
    """Yield a base weight as float32, one row of blocks at a time, whether 16-bit or FP8."""
    tensor = base.tensor(name)
    columns = tensor.shape[1]
    if tensor.dtype == FP8:
        grid = base.tensor(scale_of(name))
        scales = floats(read_span(base.span(scale_of(name))), grid.dtype, grid.shape)
        yield from fp8_rows(base.span(name), scales, columns, block)
        return
    for raw in pieces_of_span(base.span(name), columns * 2 * block[0]):
        yield floats(raw, tensor.dtype, (len(raw) // (columns * 2), columns))


@dataclass(frozen=True, slots=True)
class Surgery:
    """What is cut out of a base and put into it, and the bytes of the donor for it."""

    base: Tree
    modules: list[str]  # whose weights are compared or replaced
    block: tuple[int, int]
    taken: Mapping[str, Tensor]  # of the donor
    spans: Mapping[str, Span]  # where their bytes lie on this host
    stage: Staging
    progress: Progress
    changes: Changes

    def compare_with_donor(self) -> None:
        """Refuse a donor whose FP8 weights are not the base's own weights, module by module."""
        errors = self._each("spot-check", self._compared)
        check_outliers(dict(zip(self.modules, errors, strict=True)))
        self.changes.report["shared_experts"] = {
            **_error_report([error.module for error in errors]),
            "elements_beyond_rounding": sum(error.beyond for error in errors),
        }

    def swap_from_donor(self) -> None:
        """Take FP8 weights and scales from the donor."""
        for module in self.modules:
            self.changes.added[module + WEIGHT] = [
                NewTensor(name, self.taken[name].dtype, self.taken[name].shape, self.spans[name])
                for name in (module + WEIGHT, module + SCALE)
            ]

    def swap_by_own_fp8(self) -> None:
        """Quantise the base's own 16-bit weights to FP8 with block scales."""
        self._quantise(self._own_fp8)

    def swap_by_int8(self) -> None:
        """Quantise the base's own 16-bit weights to GPTQ-packed INT8."""

        def one(module: str) -> tuple[list[NewTensor], float]:
            name = module + WEIGHT
            packed = pack_weight(self.base, name, self.stage, lambda count: None, workers=1)
            return packed.tensors, packed.error

        self._quantise(one)

    def bake_head(self, name: str) -> None:
        """Replace the LM head by packed INT8."""
        self.progress.phase("head", self.base.tensor(name).size_bytes)
        packed = pack_weight(self.base, name, self.stage, self.progress.add, WORKERS)
        self.changes.added[name] = packed.tensors
        self.changes.report["head"] = {
            "relative_error": _rounded(packed.error),
            "relative_error_by_maximum": _rounded(packed.error_by_maximum),
        }

    def donor_scales(self, weight_name: str) -> Floats:
        """Return the block scales of a donor's FP8 weight; refuse what cannot be scales."""
        name = scale_of(weight_name)
        scales = floats(read_span(self.spans[name]), self.taken[name].dtype, self.taken[name].shape)
        check_scales(weight_name, scales)
        return scales

    def _compared(self, module: str) -> Error:
        name = module + WEIGHT
        comparison = Comparison(self.donor_scales(name), self.block)
        codes = pieces_of_span(self.spans[name], self.taken[name].shape[1] * self.block[0])
        for weights in _weight_rows(self.base, name, self.block):
            piece = np.frombuffer(next(codes), np.uint8)
            comparison.add(weights, piece.reshape(weights.shape))
        return check_module(module, comparison)

    def _own_fp8(self, module: str) -> tuple[list[NewTensor], float]:
        shape, block = self.base.tensor(module + WEIGHT).shape, self.block
        grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        span = self.stage.reserve(shape[0] * shape[1])
        lost = power = 0.0
        scales = []
        for number, weights in enumerate(_weight_rows(self.base, module + WEIGHT, block)):
            codes, bits = quantise_blocks(weights, block)
            self.stage.write(span, number * block[0] * shape[1], codes.tobytes())
            scales.append(bits.tobytes())
            error = dequantise(codes, from_bf16_bits(bits), block) - weights
            lost += float((error * error).sum(dtype="f8"))
            power += float((weights * weights).sum(dtype="f8"))
        tensors = [
            NewTensor(module + WEIGHT, FP8, shape, span),
            NewTensor(module + SCALE, "BF16", grid, self.stage.append(b"".join(scales))),
        ]
        return tensors, (lost / power) ** 0.5 if power else 0.0

    def _quantise(self, one: Callable[[str], tuple[list[NewTensor], float]]) -> None:
        made = self._each("quantise", one)
        for module, (tensors, _) in zip(self.modules, made, strict=True):
            self.changes.added[module + WEIGHT] = tensors
        self.changes.report["shared_experts"] = _error_report([error for _, error in made])

    def _each(self, phase: str, work: Callable[[str], _T]) -> list[_T]:
        """Run ``work`` for all modules with few workers; the first failure ends it."""
        sizes = {module: self.base.tensor(module + WEIGHT).size_bytes for module in self.modules}
        self.progress.phase(phase, sum(sizes.values()))

        def one(module: str) -> _T:
            result = work(module)
            self.progress.add(sizes[module])
            return result

        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(one, self.modules))


def _error_report(errors: Sequence[float]) -> dict[str, Any]:
    if not errors:
        return {"modules": 0}
    return {
        "modules": len(errors),
        "relative_error_mean": _rounded(sum(errors) / len(errors)),
        "relative_error_max": _rounded(max(errors)),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
