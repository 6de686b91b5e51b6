"""Make the tensors that replace or join the base's: FP8, packed INT8 and grafted MTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from spark_checkpoint.build.donor_comparison import (
    Comparison,
    Error,
    check_module,
    check_outliers,
    check_scales,
)
from spark_checkpoint.build.write import Changes, NewTensor, Staging, pieces_of_span
from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.directory import Checkpoint, Span, read_span
from spark_checkpoint.format.headers import Tensor
from spark_checkpoint.format.numbers import (
    GROUP,
    PACK,
    Floats,
    bf16_bits,
    dequantise,
    floats,
    from_bf16_bits,
    pack_rows,
    quantise_blocks,
    quantise_rows,
    zero_points,
)
from spark_checkpoint.progress import Progress
from spark_checkpoint.storage import WORKERS
from spark_checkpoint.tensor_sets import FP8, SCALE, WEIGHT, scale_of

# Weights quantised at once: their float32 copies stay in the processor's cache.
_CODE_WEIGHTS = 64 << 10
# Codes packed at once: longer rows of the packed weight mean fewer writes.
_BLOCK_BYTES = 3 << 20


class Packed(NamedTuple):
    """The three tensors of a packed weight, and its relative errors."""

    tensors: list[NewTensor]
    error: float
    error_by_maximum: float


def pack_weight(
    base: Checkpoint, name: str, stage: Staging, on_bytes: Callable[[int], None], workers: int
) -> Packed:
    """Quantise the base's weight ``name`` and stage ``qweight``, ``scales`` and ``qzeros``.

    ``workers`` quantise blocks of rows; ``on_bytes`` is told about source bytes that are done.
    """
    outputs, inputs = base.tensor(name).shape
    dtype, span = base.tensor(name).dtype, base.span(name)
    qweight = stage.reserve(outputs * inputs)
    scales = np.empty((inputs // GROUP, outputs), "<u2")
    code_rows = max(1, _CODE_WEIGHTS // inputs)
    block_rows = max(code_rows, _BLOCK_BYTES // inputs // code_rows * code_rows)

    def quantise_block(first: int) -> Any:
        count = min(block_rows, outputs - first)
        codes = np.empty((count, inputs), np.uint8)
        sums = np.zeros(3)
        for row in range(0, count, code_rows):
            taken = min(code_rows, count - row)
            start = span.offset + (first + row) * inputs * 2
            raw = read_span(Span(span.path, start, taken * inputs * 2))
            rows = quantise_rows(floats(raw, dtype, (taken, inputs)))
            codes[row : row + taken] = rows.codes
            scales[:, first + row : first + row + taken] = rows.scales.T
            sums += (rows.error, rows.error_by_maximum, rows.power)
            on_bytes(len(raw))
        for line, packed in enumerate(pack_rows(codes)):
            stage.write(qweight, (line * outputs + first) * PACK, packed.data)
        return sums

    with ThreadPoolExecutor(workers) as pool:
        error, by_maximum, power = sum(pool.map(quantise_block, range(0, outputs, block_rows)))
    module, groups = name.removesuffix(WEIGHT), inputs // GROUP
    # Group by group: those of a large head are 8 MB.
    one_group = zero_points(outputs, GROUP)
    zeros = stage.reserve(groups * len(one_group))
    for group in range(groups):
        stage.write(zeros, group * len(one_group), one_group)
    tensors = [
        NewTensor(f"{module}.qweight", "I32", (inputs // PACK, outputs), qweight),
        NewTensor(f"{module}.scales", "BF16", (groups, outputs), stage.append(scales.data)),
        NewTensor(f"{module}.qzeros", "I32", (groups, outputs // PACK), zeros),
    ]
    divisor = power if power else 1.0
    return Packed(tensors, float((error / divisor) ** 0.5), float((by_maximum / divisor) ** 0.5))


_T = TypeVar("_T")


def fp8_rows(span: Span, scales: Floats, columns: int, block: tuple[int, int]) -> Iterator[Floats]:
    """Yield an FP8 matrix as float32, one row of blocks at a time."""
    for number, raw in enumerate(pieces_of_span(span, max(1, columns * block[0]))):
        codes = np.frombuffer(raw, np.uint8).reshape(-1, columns)
        yield dequantise(codes, scales[number : number + 1], block)


def _weight_rows(base: Checkpoint, name: str, block: tuple[int, int]) -> Iterator[Floats]:
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

    base: Checkpoint
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

        def pack(module: str) -> tuple[list[NewTensor], float]:
            name = module + WEIGHT
            packed = pack_weight(self.base, name, self.stage, lambda count: None, workers=1)
            return packed.tensors, packed.error

        self._quantise(pack)

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

    def _quantise(self, quantise: Callable[[str], tuple[list[NewTensor], float]]) -> None:
        made = self._each("quantise", quantise)
        for module, (tensors, _) in zip(self.modules, made, strict=True):
            self.changes.added[module + WEIGHT] = tensors
        self.changes.report["shared_experts"] = _error_report([error for _, error in made])

    def _each(self, phase: str, work: Callable[[str], _T]) -> list[_T]:
        """Run ``work`` for all modules with few workers; the first failure ends it."""
        sizes = {module: self.base.tensor(module + WEIGHT).size_bytes for module in self.modules}
        self.progress.phase(phase, sum(sizes.values()))

        def run(module: str) -> _T:
            result = work(module)
            self.progress.add(sizes[module])
            return result

        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(run, self.modules))


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


_PIECE_BYTES = 1 << 20
_EXPONENT_BITS = {"BF16": 0x7F80, "F16": 0x7C00}
_FIX = "fetch the donor again, or use the FP8 repository of the same model"


def graft_mtp(names: Sequence[str], surgery: Surgery) -> None:
    """Take MTP tensors the base lacks from the donor, its FP8 ones dequantised to BF16."""
    grafted = []
    for name in names:
        entry, span = surgery.taken[name], surgery.spans[name]
        if entry.dtype == FP8:
            span = _dequantised(name, surgery)
            entry = Tensor("BF16", entry.shape, 0, span.size_bytes)
        else:
            _check_values(name, entry, pieces_of_span(span, _PIECE_BYTES))
        grafted.append(NewTensor(name, entry.dtype, entry.shape, span))
    surgery.changes.added.setdefault("", []).extend(grafted)
    surgery.changes.report["mtp_grafted"] = len(grafted)


def _dequantised(name: str, surgery: Surgery) -> Span:
    """Stage the BF16 form of an FP8 matrix, one row of blocks at a time, and check its values."""
    entry, span, scales = surgery.taken[name], surgery.spans[name], surgery.donor_scales(name)
    plain = surgery.stage.reserve(span.size_bytes * 2)

    def pieces() -> Iterator[bytes]:
        position = 0
        for rows in fp8_rows(span, scales, entry.shape[1], surgery.block):
            values = bf16_bits(rows).tobytes()
            surgery.stage.write(plain, position, values)
            position += len(values)
            yield values

    _check_values(name, entry._replace(dtype="BF16"), pieces())
    return plain


def _check_values(name: str, entry: Tensor, pieces: Iterator[bytes]) -> None:
    """Refuse NaN, infinity, and a matrix of zeros; a norm around zero may be all zero."""
    exponent = _EXPONENT_BITS[entry.dtype]
    any_nonzero = len(entry.shape) < 2
    for piece in pieces:
        words = np.frombuffer(piece, "<u2")
        if bool(((words & exponent) == exponent).any()):
            raise GateRefused(f"donor {name}", "holds NaN or infinite values", _FIX)
        any_nonzero = any_nonzero or bool((words & 0x7FFF).any())
    if not any_nonzero:
        raise GateRefused(f"donor {name}", "is all zero", _FIX)
