"""Create new tensors: FP8 and packed weights, and MTP layers that the base lacks.

FP8 weights of the donor are first compared with the base's weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from spark_checkpoint import ValidationError
from spark_checkpoint.build.write import GRAFTED, Changes, NewTensor, Staging, split_span
from spark_checkpoint.directory import Checkpoint, Span, read_span
from spark_checkpoint.headers import Tensor
from spark_checkpoint.number_formats import (
    GROUP,
    INT4_LIMIT,
    WORD_BITS,
    ZERO_POINT_BYTES,
    Comparison,
    Deviation,
    Floats,
    bf16_bits,
    check_outliers,
    check_scale_sizes,
    dequantize,
    from_bf16_bits,
    pack_rows,
    packed_tensors,
    quantize_blocks,
    quantize_rows,
    read_floats,
    reduce_blocks,
    to_floats,
)
from spark_checkpoint.progress import Progress
from spark_checkpoint.storage import WORKERS
from spark_checkpoint.tensor_sets import FP8, SCALE, WEIGHT, block_grid, scale_name

# Limits of the relative error, which varies more between blocks than between modules.
MODULE_LIMIT = 0.04
BLOCK_LIMIT = 0.08
_CHUNK_BYTES = 1 << 20
_EXPONENT_BITS = {"BF16": 0x7F80, "F16": 0x7C00}
_FIX = "use an FP8 source and a base of the same model, at the locked commits"
_MTP_FIX = "download the FP8 source again, or use the FP8 repository of the same model"

_WEIGHTS_AT_ONCE = 64 << 10  # fits in the processor's cache
# INT8 codes to pack at once, because large blocks need few writes.
_BLOCK_BYTES = 3 << 20

_T = TypeVar("_T")


def _read_fp8_rows(
    span: Span, scales: Floats, columns: int, block: tuple[int, int]
) -> Iterator[Floats]:
    for block_row, raw in enumerate(split_span(span, max(1, columns * block[0]))):
        codes = np.frombuffer(raw, np.uint8).reshape(-1, columns)
        yield dequantize(codes, scales[block_row : block_row + 1], block)


def _read_weight_rows(base: Checkpoint, name: str, block: tuple[int, int]) -> Iterator[Floats]:
    tensor = base.tensor(name)
    columns = tensor.shape[1]
    if tensor.dtype == FP8:
        scales = read_floats(base, scale_name(name))
        yield from _read_fp8_rows(base.span(name), scales, columns, block)
        return
    for raw in split_span(base.span(name), columns * 2 * block[0]):
        yield to_floats(raw, tensor.dtype, (len(raw) // (columns * 2), columns))


class Packed(NamedTuple):
    tensors: list[NewTensor]
    error: float


def pack_weight(
    weight: NewTensor,
    bits: int,
    stage: Staging,
    on_bytes: Callable[[int], None] = lambda count: None,
    workers: int = 1,
) -> Packed:
    """Quantize a 16-bit weight in blocks of rows, and stage the packed tensors."""
    name, dtype, (outputs, inputs), span = weight
    qweight = stage.reserve(outputs * inputs * bits // 8)
    scales = np.empty((inputs // GROUP, outputs), "<u2")
    rows_at_once = max(1, _WEIGHTS_AT_ONCE // inputs)
    block_rows = rows_at_once * max(1, _BLOCK_BYTES // inputs // rows_at_once)

    def quantize_block(first_row: int) -> Any:
        count = min(block_rows, outputs - first_row)
        codes = np.empty((count, inputs), np.uint8)
        sums = np.zeros(2)
        for row in range(0, count, rows_at_once):
            row_count = min(rows_at_once, count - row)
            start = span.offset + (first_row + row) * inputs * 2
            raw = read_span(Span(span.path, start, row_count * inputs * 2))
            values = to_floats(raw, dtype, (row_count, inputs))
            _check_finite(name, values)
            rows = quantize_rows(values, bits)
            codes[row : row + row_count] = rows.codes
            scales[:, first_row + row : first_row + row + row_count] = rows.scales.T
            sums += (rows.squared_error, rows.squared_weights)
            on_bytes(len(raw))
        for packed_row, words in enumerate(pack_rows(codes, bits)):
            stage.write(qweight, (packed_row * outputs + first_row) * WORD_BITS // 8, words.data)
        return sums

    with ThreadPoolExecutor(workers) as pool:
        squared_error, squared_weights = sum(
            pool.map(quantize_block, range(0, outputs, block_rows))
        )
    zeros = bytes([ZERO_POINT_BYTES[bits]]) * (inputs // GROUP * outputs * bits // 8)
    spans = (qweight, stage.append(scales.data), stage.append(zeros))
    parts = packed_tensors(weight.shape, bits).items()
    tensors = [
        NewTensor(name.removesuffix(WEIGHT) + suffix, part_dtype, shape, part_span)
        for (suffix, (part_dtype, shape)), part_span in zip(parts, spans, strict=True)
    ]
    return Packed(tensors, float((squared_error / (squared_weights or 1.0)) ** 0.5))


@dataclass(frozen=True, slots=True)
class TensorMaker:
    base: Checkpoint
    modules: list[str]  # modules to compare or replace
    block: tuple[int, int]
    donor: Mapping[str, Tensor]
    spans: Mapping[str, Span]  # of the donor's tensors
    stage: Staging
    progress: Progress
    changes: Changes

    def compare_with_donor(self) -> None:
        results = self._run_in_parallel("spot-check", self._compare, self._weight_bytes())
        deviations = dict(zip(self.modules, results, strict=True))
        check_outliers(deviations)
        errors = [deviation.module_error for deviation in deviations.values()]
        self.changes.report["shared_experts"] = _error_report(errors)

    def swap_from_donor(self) -> None:
        for module in self.modules:
            self.changes.added[module + WEIGHT] = [
                NewTensor(name, self.donor[name].dtype, self.donor[name].shape, self.spans[name])
                for name in (module + WEIGHT, module + SCALE)
            ]

    def swap_to_fp8(self) -> None:
        self._swap(self._to_fp8)

    def swap_to_int8(self) -> None:
        self._swap(lambda name: pack_weight(self._base_weight(name + WEIGHT), 8, self.stage))

    def pack_head(self, name: str) -> None:
        self.progress.start_phase("head", self.base.tensor(name).size_bytes)
        packed = pack_weight(self._base_weight(name), 8, self.stage, self.progress.add, WORKERS)
        self.changes.added[name] = packed.tensors
        self.changes.report["head"] = {"relative_error": _rounded(packed.error)}

    def graft_mtp(self, names: Sequence[str]) -> None:
        """Add the donor's MTP tensors that the base lacks; FP8 becomes BF16."""
        grafted, used_scales = [], {}
        for name in names:
            entry, span = self.donor[name], self.spans[name]
            if entry.dtype == FP8:
                span = self.stage.reserve(span.size_bytes * 2)
                entry = Tensor("BF16", entry.shape, 0, span.size_bytes)
                used_blocks: list[Any] = []
                # Also stages the values, because the check consumes the iterator.
                _check_values(name, entry, self._stage_bf16(name, span, used_blocks))
                used_scales[name] = self._donor_scales(name)[np.concatenate(used_blocks)]
            else:
                _check_values(name, entry, split_span(span, _CHUNK_BYTES))
            grafted.append(NewTensor(name, entry.dtype, entry.shape, span))
        check_scale_sizes(used_scales)
        self.changes.added.setdefault(GRAFTED, []).extend(grafted)

    def pack_drafter(self, names: Sequence[str]) -> None:
        """Quantize 16-bit MTP weights, including grafted weights, to INT4."""
        added = self.changes.added
        grafted = {tensor.name: tensor for tensor in added.get(GRAFTED, ())}
        weights = {name: grafted.get(name) or self._base_weight(name) for name in names}

        def pack(name: str) -> Packed:
            packed = pack_weight(weights[name], 4, self.stage)
            if packed.error > INT4_LIMIT:
                difference = f"{packed.error:.1%} (limit {INT4_LIMIT:.0%})"
                problem = f"INT4 differs from the 16-bit weight by {difference}"
                raise ValidationError(name, problem, "set drafter: keep")
            return packed

        sizes = {name: weight.span.size_bytes for name, weight in weights.items()}
        results = self._run_in_parallel("drafter", pack, sizes)
        for name, packed in zip(names, results, strict=True):
            if name in grafted:
                position = added[GRAFTED].index(grafted[name])
                added[GRAFTED][position : position + 1] = packed.tensors
            else:
                added[name] = packed.tensors
        self.changes.report["drafter"] = _error_report([packed.error for packed in results])

    def _base_weight(self, name: str) -> NewTensor:
        tensor = self.base.tensor(name)
        return NewTensor(name, tensor.dtype, tensor.shape, self.base.span(name))

    def _stage_bf16(self, name: str, target: Span, used_blocks: list[Any]) -> Iterator[bytes]:
        """Stage an FP8 matrix as BF16, and yield its bytes, one row of blocks at a time.

        For each row, append to ``used_blocks`` a mask of the blocks with a nonzero weight.
        """
        position, scales = 0, self._donor_scales(name)
        for rows in _read_fp8_rows(self.spans[name], scales, self.donor[name].shape[1], self.block):
            values = bf16_bits(rows).tobytes()
            self.stage.write(target, position, values)
            position += len(values)
            used_blocks.append(reduce_blocks(np.maximum, np.abs(rows), self.block) > 0)
            yield values

    def _donor_scales(self, weight_name: str) -> Floats:
        name = scale_name(weight_name)
        entry = self.donor[name]
        scales = to_floats(read_span(self.spans[name]), entry.dtype, entry.shape)
        if not np.isfinite(scales).all() or not (scales > 0).all():
            raise ValidationError(
                weight_name, "FP8 source scales must be finite and positive", _FIX
            )
        return scales

    def _compare(self, module: str) -> Deviation:
        """Return how much a donor weight differs from the base's; reject large differences."""
        name = module + WEIGHT
        comparison = Comparison(self._donor_scales(name), self.block)
        codes = split_span(self.spans[name], self.donor[name].shape[1] * self.block[0])
        for weights in _read_weight_rows(self.base, name, self.block):
            comparison.add(weights, np.frombuffer(next(codes), np.uint8).reshape(weights.shape))
        if comparison.any_nan:
            raise ValidationError(module, "the weight in the FP8 source has NaN codes", _FIX)
        if not comparison.any_nonzero:
            raise ValidationError(module, "the weight in the FP8 source is all zero", _FIX)
        deviation = comparison.deviation()
        module_error, worst_block_error, _ = deviation
        # `not <=` also rejects NaN.
        if not (module_error <= MODULE_LIMIT and worst_block_error <= BLOCK_LIMIT):
            problem = (
                f"the FP8 source differs from the base's weight by {module_error:.1%} "
                f"(limit {MODULE_LIMIT:.0%}), and in the worst block by {worst_block_error:.1%} "
                f"(limit {BLOCK_LIMIT:.0%}); rounding to FP8 changes a weight by about 2.6%"
            )
            raise ValidationError(module, problem, _FIX)
        return deviation

    def _to_fp8(self, module: str) -> Packed:
        shape, block = self.base.tensor(module + WEIGHT).shape, self.block
        grid = block_grid(shape, block)
        span = self.stage.reserve(shape[0] * shape[1])
        squared_error = squared_weights = 0.0
        scales = []
        for number, weights in enumerate(_read_weight_rows(self.base, module + WEIGHT, block)):
            _check_finite(module + WEIGHT, weights)
            codes, scale_bits = quantize_blocks(weights, block)
            self.stage.write(span, number * block[0] * shape[1], codes.tobytes())
            scales.append(scale_bits.tobytes())
            error = dequantize(codes, from_bf16_bits(scale_bits), block) - weights
            squared_error += float((error * error).sum(dtype="f8"))
            squared_weights += float((weights * weights).sum(dtype="f8"))
        tensors = [
            NewTensor(module + WEIGHT, FP8, shape, span),
            NewTensor(module + SCALE, "BF16", grid, self.stage.append(b"".join(scales))),
        ]
        relative_error = (squared_error / squared_weights) ** 0.5 if squared_weights else 0.0
        return Packed(tensors, relative_error)

    def _swap(self, quantize: Callable[[str], Packed]) -> None:
        """Replace all modules; ``quantize`` returns a module's new tensors and relative error."""
        results = self._run_in_parallel("quantize", quantize, self._weight_bytes())
        for module, (tensors, _) in zip(self.modules, results, strict=True):
            self.changes.added[module + WEIGHT] = tensors
        self.changes.report["shared_experts"] = _error_report([error for _, error in results])

    def _weight_bytes(self) -> dict[str, int]:
        return {module: self.base.tensor(module + WEIGHT).size_bytes for module in self.modules}

    def _run_in_parallel(
        self, phase: str, work: Callable[[str], _T], sizes: Mapping[str, int]
    ) -> list[_T]:
        self.progress.start_phase(phase, sum(sizes.values()))

        def run(name: str) -> _T:
            result = work(name)
            self.progress.add(sizes[name])
            return result

        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(run, sizes))


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


def _check_finite(name: str, values: Floats) -> None:
    if not np.isfinite(values).all():
        raise ValidationError(name, "has NaN or infinite values", "download the base again")


def _check_values(name: str, entry: Tensor, chunks: Iterator[bytes]) -> None:
    """Raise ValidationError for NaN, infinity and all-zero matrices; vectors may be all zero."""
    exponent = _EXPONENT_BITS[entry.dtype]
    any_nonzero = len(entry.shape) < 2
    for chunk in chunks:
        words = np.frombuffer(chunk, "<u2")
        if bool(((words & exponent) == exponent).any()):
            raise ValidationError(f"donor {name}", "has NaN or infinite values", _MTP_FIX)
        any_nonzero = any_nonzero or bool((words & 0x7FFF).any())
    if not any_nonzero:
        raise ValidationError(f"donor {name}", "is all zero", _MTP_FIX)
