"""Write the n-gram embedding table (PLE) of a checkpoint to a file of verifiable blocks.

``spark_vllm.ngram_table`` reads the file and describes it.
"""

import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spark_checkpoint import ValidationError
from spark_checkpoint.build.write import HashingFile, Written
from spark_checkpoint.directory import Checkpoint, Span, read_span
from spark_checkpoint.number_formats import (
    Codes,
    Floats,
    from_e4m3,
    read_floats,
    to_e4m3,
    to_floats,
)
from spark_checkpoint.progress import Progress
from spark_checkpoint.storage import WORKERS
from spark_checkpoint.tensor_sets import FP8, NGRAM_TABLE

FORMAT = "spark-ngram-table-1"
BLOCK_BYTES = 4096
GROUP = 16
E2M1_MAX, E4M3_MAX = 6.0, 448.0
# The nearest e2m1 code (0, 0.5, 1, 1.5, 2, 3, 4, 6) for each magnitude in quarters.
_E2M1_CODES = np.searchsorted([1, 3, 5, 7, 10, 14, 20], np.arange(32), side="right").astype("u1")
_CHUNK_ROWS = 1 << 16
_SHARD = re.compile(
    r"(model\.language_model\.layers\.(\d+)\.ple\.ple_embedding\.ngram_embedding)\.shard_(\d+)\.weight"
)
_FIX = "use another commit of the base, or set `ngram_table: keep`"


@dataclass(frozen=True, slots=True)
class NgramTable:
    """A table of the base, as consecutive shards of rows."""

    base: Checkpoint
    prefix: str
    layer: int
    shards: tuple[str, ...]
    number_format: str  # of the file: "e2m1" or "e4m3"

    @property
    def file_name(self) -> str:
        return f"ngram-table-{self.layer}.bin"

    @property
    def rows(self) -> int:
        return sum(self.base.tensor(shard).shape[0] for shard in self.shards)

    @property
    def width(self) -> int:
        first = self.base.tensor(self.shards[0])
        return first.shape[1] * (2 if first.dtype == "U8" else 1)

    @property
    def row_bytes(self) -> int:
        return self.width if self.number_format == "e4m3" else self.width // 2 + self.width // GROUP

    @property
    def file_bytes(self) -> int:
        rows_per_block = (BLOCK_BYTES - 4) // self.row_bytes
        return BLOCK_BYTES * (1 - (-self.rows // rows_per_block))

    def write(self, directory: Path, progress: Progress) -> Written:
        size_bytes = sum(self.base.tensor(shard).size_bytes for shard in self.shards)
        progress.start_phase("ngram-table", size_bytes)
        encode, scale = self._select_encoder()
        header = {
            "format": FORMAT,
            "rows": self.rows,
            "width": self.width,
            "number_format": self.number_format,
            "scale": scale,
        }
        with closing(HashingFile(directory / self.file_name)) as sink:
            sink.write(_add_checksum(json.dumps(header).encode(), 0))
            block_number = 1
            rows_per_block = (BLOCK_BYTES - 4) // self.row_bytes
            for rows in _regroup_rows(self._encode_all(encode, progress), rows_per_block):
                blocks = []
                for start in range(0, len(rows), rows_per_block):
                    content = rows[start : start + rows_per_block].tobytes()
                    blocks.append(_add_checksum(content, block_number))
                    block_number += 1
                sink.write(b"".join(blocks))
            return sink.finish()

    def _select_encoder(self) -> tuple[Callable[[str, int, int], Codes], float]:
        """Return a function that encodes rows of a shard, and the scale of the whole table."""
        dtype = self.base.tensor(self.shards[0]).dtype
        if dtype == "U8" and self.number_format == "e2m1":
            return self._join_packed, self._read_scale("weight_scale_2")
        if dtype == FP8:
            scale = self._read_scale("weight_scale")
            if self.number_format == "e4m3":
                return self._read_fp8, scale
            # With this table scale, a group's scale is its largest FP8 value, which is at most 448.
            table_scale = scale / E2M1_MAX

            def requantize(shard: str, start: int, count: int) -> Codes:
                values = from_e4m3(self._read_fp8(shard, start, count)) * np.float32(scale)
                return quantize_to_e2m1(values, table_scale)

            return requantize, float(np.float32(table_scale))
        if dtype in ("BF16", "F16") and self.number_format == "e2m1":
            largest = max(
                float(np.abs(self._read_floats(*chunk)).max()) for chunk in self._chunks()
            )
            table_scale = float(np.float32(largest / (E2M1_MAX * E4M3_MAX))) or 1.0

            def quantize(shard: str, start: int, count: int) -> Codes:
                return quantize_to_e2m1(self._read_floats(shard, start, count), table_scale)

            return quantize, table_scale
        problem = f"is {dtype}, which cannot be converted to {self.number_format}"
        raise ValidationError(self.shards[0], problem, _FIX)

    def _chunks(self) -> Iterator[tuple[str, int, int]]:
        """Yield the shard, the first row and the number of rows of each chunk."""
        for shard in self.shards:
            rows = self.base.tensor(shard).shape[0]
            for start in range(0, rows, _CHUNK_ROWS):
                yield shard, start, min(_CHUNK_ROWS, rows - start)

    def _encode_all(
        self, encode: Callable[[str, int, int], Codes], progress: Progress
    ) -> Iterator[Codes]:
        chunks = self._chunks()
        with ThreadPoolExecutor(WORKERS) as pool:
            while batch := list(itertools.islice(chunks, WORKERS)):
                encoded = pool.map(lambda chunk: encode(*chunk), batch)
                for (shard, _, count), rows in zip(batch, encoded, strict=True):
                    tensor = self.base.tensor(shard)
                    progress.add(count * tensor.size_bytes // tensor.shape[0])
                    yield rows

    def _read(self, name: str, start: int, count: int) -> bytes:
        tensor, span = self.base.tensor(name), self.base.span(name)
        row_bytes = tensor.size_bytes // tensor.shape[0]
        return read_span(Span(span.path, span.offset + start * row_bytes, count * row_bytes))

    def _read_floats(self, shard: str, start: int, count: int) -> Floats:
        dtype = self.base.tensor(shard).dtype
        values = to_floats(self._read(shard, start, count), dtype, (count, self.width))
        if not np.isfinite(values).all():
            raise ValidationError(shard, "has NaN or infinite values", _FIX)
        return values

    def _read_fp8(self, shard: str, start: int, count: int) -> Codes:
        codes = np.frombuffer(self._read(shard, start, count), np.uint8).reshape(count, -1)
        if ((codes & 0x7F) == 0x7F).any():
            raise ValidationError(shard, "has NaN codes", _FIX)
        return codes

    def _join_packed(self, shard: str, start: int, count: int) -> Codes:
        scales = self._read_fp8(f"{shard}_scale", start, count)
        packed = np.frombuffer(self._read(shard, start, count), np.uint8).reshape(count, -1)
        return np.concatenate([packed, scales], axis=1)

    def _read_scale(self, part: str) -> float:
        name = f"{self.prefix}.{part}"
        if name not in self.base.owner:
            raise ValidationError(name, "is missing", _FIX)
        scales = read_floats(self.base, name).reshape(-1)
        if len(scales) != 1 or not 0 < float(scales[0]) < np.inf:
            raise ValidationError(name, f"is {scales.tolist()}, expected a positive number", _FIX)
        return float(scales[0])


def table_tensors(base: Checkpoint) -> list[str]:
    return [name for name in base.owner if NGRAM_TABLE in name]


def find_tables(base: Checkpoint, number_format: str) -> list[NgramTable]:
    """Return the tables to write; their shards must be numbered from 0 without gaps."""
    if number_format == "keep":
        return []
    shards_by_table: dict[tuple[str, int], dict[int, str]] = {}
    for name in base.owner:
        match = _SHARD.fullmatch(name)
        if match:
            prefix, layer, number = match[1], int(match[2]), int(match[3])
            shards_by_table.setdefault((prefix, layer), {})[number] = name
    tables = []
    for (prefix, layer), shards in sorted(shards_by_table.items()):
        missing = set(range(max(shards) + 1)) - shards.keys()
        if missing:
            fix = "download the base again"
            raise ValidationError(
                prefix, f"shard_{min(missing)} of {max(shards) + 1} is missing", fix
            )
        ordered = tuple(shards[number] for number in sorted(shards))
        tables.append(NgramTable(base, prefix, layer, ordered, number_format))
        _check_shapes(tables[-1])
    return tables


def size_change_bytes(base: Checkpoint, number_format: str) -> int:
    """Return the size of the tables' files minus that of the tensors that they replace."""
    tables = find_tables(base, number_format)
    replaced = (base.tensor(name).size_bytes for name in table_tensors(base) if tables)
    return sum(table.file_bytes for table in tables) - sum(replaced)


def _check_shapes(table: NgramTable) -> None:
    """Raise ValidationError unless all shards have rows of the same kind that fit in a block."""
    base, first = table.base, table.base.tensor(table.shards[0])
    if len(first.shape) != 2:
        raise ValidationError(table.shards[0], f"is {list(first.shape)}, expected a matrix", _FIX)
    for shard in table.shards:
        rows = base.tensor(shard).shape[0]
        expected = {shard: (first.dtype, (rows, first.shape[1]))}
        if first.dtype == "U8":
            expected[f"{shard}_scale"] = (FP8, (rows, table.width // GROUP))
        for name, (dtype, shape) in expected.items():
            if name not in base.owner:
                raise ValidationError(name, "is missing", _FIX)
            actual = base.tensor(name)
            if actual.dtype_and_shape != (dtype, shape):
                problem = f"is {actual.dtype} {list(actual.shape)}, expected {dtype} {list(shape)}"
                raise ValidationError(name, problem, _FIX)
    if table.number_format == "e2m1" and table.width % GROUP:
        problem = f"has rows of {table.width} numbers, expected a multiple of {GROUP}"
        raise ValidationError(table.prefix, problem, _FIX)
    if table.row_bytes > BLOCK_BYTES - 4:
        problem = f"has rows of {table.row_bytes} bytes, but a block holds {BLOCK_BYTES - 4}"
        raise ValidationError(table.prefix, problem, _FIX)


def quantize_to_e2m1(values: Floats, table_scale: float) -> Codes:
    """Round rows to e2m1; return each row's packed codes, then an e4m3 scale per 16 numbers."""
    groups = values.reshape(len(values), -1, GROUP)
    largest = np.abs(groups).max(axis=2)
    unit = np.float32(table_scale)
    scale_codes = to_e4m3(np.minimum(largest / (np.float32(E2M1_MAX) * unit), np.float32(E4M3_MAX)))
    scales = from_e4m3(scale_codes) * unit
    # Magnitudes in quarters of the group's scale; zero if the scale is zero.
    quarters = np.abs(groups) * (4 / np.where(scales > 0, scales, np.inf))[:, :, None]
    numbers = _E2M1_CODES[np.minimum(quarters, 31).astype(np.uint8)]
    numbers |= np.signbit(groups).astype(np.uint8) << 3
    pairs = numbers.reshape(len(values), -1, 2)
    return np.concatenate([pairs[:, :, 0] | pairs[:, :, 1] << 4, scale_codes], axis=1)


def _regroup_rows(arrays: Iterator[Codes], multiple: int) -> Iterator[Codes]:
    """Yield the same rows in arrays whose lengths, except the last, are multiples of a number."""
    rest: Codes | None = None
    for array in arrays:
        rows = array if rest is None else np.concatenate([rest, array])
        whole = len(rows) - len(rows) % multiple
        if whole:
            yield rows[:whole]
        rest = rows[whole:]
    if rest is not None and len(rest):
        yield rest


def _add_checksum(content: bytes, block_number: int) -> bytes:
    """Return a block of the file: the padded content and its CRC-32, seeded with the number."""
    content = content.ljust(BLOCK_BYTES - 4, b"\0")
    return content + zlib.crc32(content, block_number & 0xFFFFFFFF).to_bytes(4, "little")
