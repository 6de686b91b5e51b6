"""Makes the tensors that replace or join the base's: FP8, INT8 and grafted MTP tensors.

New bytes are staged in files of the work directory, so that writing a tree afterwards is one
kind of work: copying spans of files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spark_checkpoint.donor import Donor, Span
from spark_checkpoint.errors import TransferFailed
from spark_checkpoint.gates import SCALE, WEIGHT
from spark_checkpoint.header import Tensor
from spark_checkpoint.int8 import GROUP, PACK, pack_rows, quantise_rows, zero_points
from spark_checkpoint.numbers import (
    bf16_bits,
    dequantise,
    floats,
    from_bf16_bits,
    numpy,
    quantise_blocks,
)
from spark_checkpoint.progress import Progress
from spark_checkpoint.spotcheck import check_module, error_between
from spark_checkpoint.tree import Tree

# Each worker holds a few copies of one module or row block as float32.
WORKERS = min(3, os.cpu_count() or 1)
_HEAD_BLOCK_BYTES = 8 << 20
_CODE_ROWS = 64


class NewTensor(NamedTuple):
    """A tensor of the result that is not the base's: its bytes are a span of some file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    span: Span


@dataclass(slots=True)
class Changes:
    """Everything that will differ from the base.

    ``added`` maps a base name that disappears to the tensors standing in for it; names joining
    without a predecessor are under the empty name.
    """

    added: dict[str, list[NewTensor]] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def dropped(self) -> frozenset[str]:
        """Base names the result does not have."""
        return frozenset(name for name in self.added if name) - self.names()

    def names(self) -> set[str]:
        """Names of all new tensors."""
        return {tensor.name for tensors in self.added.values() for tensor in tensors}


class Staging:
    """One growing file that new tensor bytes are appended to."""

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._end = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

    def append(self, data: bytes) -> Span:
        """Write bytes at the end and return where they are."""
        span = self.reserve(len(data))
        self.write(span, 0, data)
        return span

    def reserve(self, size_bytes: int) -> Span:
        """Return room to be filled piece by piece."""
        with self._lock:
            span = Span(self._path, self._end, size_bytes)
            self._end += size_bytes
        return span

    def write(self, span: Span, offset: int, data: bytes | memoryview) -> None:
        """Fill part of a reserved span."""
        view = memoryview(data).cast("B")
        position = span.offset + offset
        while view:
            count = os.pwrite(self._fd, view, position)
            view, position = view[count:], position + count

    def close(self) -> None:
        """Close the file; its spans stay readable by name."""
        os.close(self._fd)


@contextmanager
def staging(path: Path) -> Iterator[Staging]:
    """Open a staging file for the duration of a block."""
    stage = Staging(path)
    try:
        yield stage
    finally:
        stage.close()


def read_span(span: Span) -> bytes:
    """Return the bytes of a span small enough to hold."""
    with span.path.open("rb", buffering=0) as file:
        data = bytearray(span.size_bytes)
        view, position = memoryview(data), span.offset
        while view:
            count = os.preadv(file.fileno(), [view], position)
            if not count:
                raise TransferFailed(str(span.path), "became shorter", "fetch it again")
            view, position = view[count:], position + count
    return bytes(data)


def base_span(base: Tree, name: str) -> Span:
    """Return where a base tensor's bytes lie."""
    shard = base.owner[name]
    header = base.shards[shard]
    return Span(base.directory / shard, header.file_offset(name), header.tensors[name].size_bytes)


def _weights(base: Tree, name: str) -> Any:
    tensor = base.tensor(name)
    return floats(read_span(base_span(base, name)), tensor.dtype, tensor.shape)


def _each(
    modules: Sequence[str], work: Callable[[str], Any], progress: Progress, size_of: Any
) -> list[Any]:
    """Run ``work`` for all modules with few workers; the first failure ends it."""

    def one(module: str) -> Any:
        result = work(module)
        progress.add(size_of(module))
        return result

    with ThreadPoolExecutor(WORKERS) as pool:
        futures = [pool.submit(one, module) for module in modules]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def swap_from_donor(
    base: Tree,
    modules: Sequence[str],
    donor: dict[str, Tensor],
    spans: dict[str, Span],
    block: tuple[int, int],
    progress: Progress,
    changes: Changes,
) -> None:
    """Take FP8 weights and scales from the donor, each proven to be the base's own weight."""
    numpy()

    def one(module: str) -> float:
        weight, scale = donor[module + WEIGHT], donor[module + SCALE]
        np: Any = numpy()
        codes = np.frombuffer(read_span(spans[module + WEIGHT]), np.uint8).reshape(weight.shape)
        scales = floats(read_span(spans[module + SCALE]), scale.dtype, scale.shape)
        weights = _weights(base, module + WEIGHT)
        return check_module(module, weights, codes, scales, block).module

    progress.phase("spot-check", sum(base.tensor(m + WEIGHT).size_bytes for m in modules))
    errors = _each(modules, one, progress, lambda m: base.tensor(m + WEIGHT).size_bytes)
    for module in modules:
        changes.added[module + WEIGHT] = [
            NewTensor(name, donor[name].dtype, donor[name].shape, spans[name])
            for name in (module + WEIGHT, module + SCALE)
        ]
    changes.report["shared_experts"] = _error_report(errors)


def swap_by_own_fp8(
    base: Tree,
    modules: Sequence[str],
    block: tuple[int, int],
    stage: Staging,
    progress: Progress,
    changes: Changes,
) -> None:
    """Quantise the base's own 16-bit weights to FP8 with block scales."""

    def one(module: str) -> tuple[list[NewTensor], float]:
        weights = _weights(base, module + WEIGHT)
        codes, scales = quantise_blocks(weights, block)
        error = error_between(weights, dequantise(codes, from_bf16_bits(scales), block), block)
        tensors = [
            NewTensor(module + WEIGHT, "F8_E4M3", codes.shape, stage.append(codes.tobytes())),
            NewTensor(module + SCALE, "BF16", scales.shape, stage.append(scales.tobytes())),
        ]
        return tensors, error.module

    _quantise(base, modules, one, progress, changes)


def swap_by_int8(
    base: Tree, modules: Sequence[str], stage: Staging, progress: Progress, changes: Changes
) -> None:
    """Quantise the base's own 16-bit weights to GPTQ-packed INT8."""

    def one(module: str) -> tuple[list[NewTensor], float]:
        outputs, inputs = base.tensor(module + WEIGHT).shape
        rows = quantise_rows(_weights(base, module + WEIGHT))
        tensors = [
            NewTensor(
                f"{module}.qweight",
                "I32",
                (inputs // PACK, outputs),
                stage.append(pack_rows(rows.codes).tobytes()),
            ),
            *_int8_companions(module, outputs, inputs, rows.scales.T.tobytes(), stage),
        ]
        return tensors, (rows.error / rows.power) ** 0.5 if rows.power else 0.0

    _quantise(base, modules, one, progress, changes)


def _quantise(
    base: Tree,
    modules: Sequence[str],
    one: Callable[[str], tuple[list[NewTensor], float]],
    progress: Progress,
    changes: Changes,
) -> None:
    progress.phase("quantise", sum(base.tensor(m + WEIGHT).size_bytes for m in modules))
    made = _each(modules, one, progress, lambda m: base.tensor(m + WEIGHT).size_bytes)
    for module, (tensors, _) in zip(modules, made, strict=True):
        changes.added[module + WEIGHT] = tensors
    changes.report["shared_experts"] = _error_report([error for _, error in made])


def bake_head(base: Tree, name: str, stage: Staging, progress: Progress, changes: Changes) -> None:
    """Quantise the LM head in row blocks; memory does not grow with the vocabulary."""
    np: Any = numpy()
    outputs, inputs = base.tensor(name).shape
    dtype = base.tensor(name).dtype
    span = base_span(base, name)
    module = name.removesuffix(WEIGHT)
    qweight = stage.reserve(outputs * inputs)
    scales = np.empty((inputs // GROUP, outputs), "<u2")
    block_rows = max(_CODE_ROWS, _HEAD_BLOCK_BYTES // inputs // _CODE_ROWS * _CODE_ROWS)
    progress.phase("head", span.size_bytes)

    def one(first: int) -> tuple[float, float, float]:
        count = min(block_rows, outputs - first)
        codes = np.empty((count, inputs), np.uint8)
        sums = np.zeros(3)
        for row in range(0, count, _CODE_ROWS):
            taken = min(_CODE_ROWS, count - row)
            start = span.offset + (first + row) * inputs * 2
            raw = read_span(Span(span.path, start, taken * inputs * 2))
            rows = quantise_rows(floats(raw, dtype, (taken, inputs)))
            codes[row : row + taken] = rows.codes
            scales[:, first + row : first + row + taken] = rows.scales.T
            sums += (rows.error, rows.error_by_maximum, rows.power)
            progress.add(len(raw))
        for line, packed in enumerate(pack_rows(codes)):
            stage.write(qweight, (line * outputs + first) * PACK, packed.data)
        return float(sums[0]), float(sums[1]), float(sums[2])

    with ThreadPoolExecutor(WORKERS) as pool:
        parts = list(pool.map(one, range(0, outputs, block_rows)))
    error, by_maximum, power = (sum(part[i] for part in parts) for i in range(3))
    changes.added[name] = [
        NewTensor(f"{module}.qweight", "I32", (inputs // PACK, outputs), qweight),
        *_int8_companions(module, outputs, inputs, scales.tobytes(), stage),
    ]
    changes.report["head"] = {
        "relative_error": _rounded((error / power) ** 0.5 if power else 0.0),
        "relative_error_by_maximum": _rounded((by_maximum / power) ** 0.5 if power else 0.0),
    }


def graft_mtp(
    names: Sequence[str],
    donor: Donor,
    spans: dict[str, Span],
    block: tuple[int, int],
    stage: Staging,
    changes: Changes,
) -> None:
    """Take MTP tensors the base lacks from the donor, its FP8 ones dequantised to BF16."""
    entries = donor.tensors(spans)
    grafted = []
    for name in names:
        entry = entries[name]
        if entry.dtype != "F8_E4M3":
            grafted.append(NewTensor(name, entry.dtype, entry.shape, spans[name]))
            continue
        np: Any = numpy()
        scale_name = scale_of(name)
        scale = entries[scale_name]
        codes = np.frombuffer(read_span(spans[name]), np.uint8).reshape(entry.shape)
        scales = floats(read_span(spans[scale_name]), scale.dtype, scale.shape)
        plain = bf16_bits(dequantise(codes, scales, block)).tobytes()
        grafted.append(NewTensor(name, "BF16", entry.shape, stage.append(plain)))
    changes.added.setdefault("", []).extend(grafted)
    changes.report["mtp_grafted"] = len(grafted)


def scale_of(weight_name: str) -> str:
    """Return the name of the block scales of an FP8 weight."""
    return weight_name.removesuffix(WEIGHT) + SCALE


def _int8_companions(
    module: str, outputs: int, inputs: int, scales: bytes, stage: Staging
) -> list[NewTensor]:
    zeros = zero_points(outputs, inputs)
    groups = inputs // GROUP
    return [
        NewTensor(f"{module}.scales", "BF16", (groups, outputs), stage.append(scales)),
        NewTensor(f"{module}.qzeros", "I32", (groups, outputs // PACK), stage.append(zeros)),
    ]


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
