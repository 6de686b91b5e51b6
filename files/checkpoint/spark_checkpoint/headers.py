"""Read, check and write safetensors headers; read the weight map of an index."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from spark_contract.files import name_file_in_errors

from spark_checkpoint import ValidationError

_WEIGHT_MAP = "weight_map"
_SPACE = rb"[ \t\n\r]*"
_STRING = _SPACE + rb'"([^"\\\x00-\x1f]*)"' + _SPACE
_WEIGHT_MAP_START = re.compile(rb'"weight_map"' + _SPACE + b":" + _SPACE + rb"\{")
_WEIGHT_MAP_ENTRY = re.compile(_STRING + b":" + _STRING + rb"([,}])")


def parse_weight_map(
    raw: bytes, where: str, fix: str, keep: Callable[[str], bool] = lambda name: True
) -> dict[str, str]:
    """Parse an index; return the file of each tensor whose name satisfies ``keep``."""
    try:
        files = _scan_weight_map(raw, keep)
        if files is not None:
            return files
        document = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValidationError(where, f"is not valid JSON ({error})", fix) from error
    files = document.get(_WEIGHT_MAP) if isinstance(document, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValidationError(where, "has no weight_map from tensor names to files", fix)
    return {name: file for name, file in files.items() if keep(name)}


def _scan_weight_map(raw: bytes, keep: Callable[[str], bool]) -> dict[str, str] | None:
    """Read the map with regular expressions, or return None if it needs the JSON parser.

    This saves memory, because an index has up to 280,000 names. To check that the map is at the top
    level, the document is then parsed with the constant NaN in place of the map.
    """
    start = _WEIGHT_MAP_START.search(raw)
    if start is None:
        return None
    weight_map: dict[str, str] = {}
    files: dict[bytes, str] = {}
    position, separator = start.end(), b","
    while separator == b",":
        entry = _WEIGHT_MAP_ENTRY.match(raw, position)
        if entry is None:
            return None
        raw_name, raw_file, separator = entry.groups()
        name, position = raw_name.decode("utf-8"), entry.end()
        if keep(name):
            file = files.get(raw_file)
            weight_map[name] = file or files.setdefault(raw_file, raw_file.decode("utf-8"))
    marker = object()
    constants = []

    def replace_constant(constant: str) -> object:
        constants.append(constant)
        return marker

    without_map = raw[: start.end() - 1] + b"NaN" + raw[position:]
    document: Any = json.loads(without_map.decode("utf-8"), parse_constant=replace_constant)
    is_top_level = isinstance(document, dict) and document.get(_WEIGHT_MAP) is marker
    return weight_map if is_top_level and len(constants) == 1 else None


# Format of safetensors 0.8: the length N in 8 bytes (little-endian), N bytes of JSON that starts
# with ``{``, and a buffer without holes. Offsets are relative to the start of the buffer.

HEADER_LIMIT_BYTES = 100_000_000
METADATA_KEY = "__metadata__"
# The reference reader rejects numbers that overflow 64 bits.
_COUNT_LIMIT = 1 << 64
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_SHAPE = re.compile(r"\[(\d+(, \d+)*)?\]")

_DTYPES = {
    4: ("F4",),
    6: ("F6_E2M3", "F6_E3M2"),
    8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    16: ("I16", "U16", "F16", "BF16"),
    32: ("I32", "U32", "F32"),
    64: ("C64", "F64", "I64", "U64"),
}
DTYPE_BITS = {dtype: bits for bits, dtypes in _DTYPES.items() for dtype in dtypes}
SIXTEEN_BIT = frozenset({"BF16", "F16"})


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin

    @property
    def dtype_and_shape(self) -> tuple[str, tuple[int, ...]]:
        return self.dtype, self.shape


class Header(NamedTuple):
    """A validated header; ``tensors`` are in buffer order."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    data_start: int
    data_bytes: int

    @property
    def file_bytes(self) -> int:
        return self.data_start + self.data_bytes

    def file_offset(self, name: str) -> int:
        return self.data_start + self.tensors[name].begin


def header_json_bytes(first: bytes, file_bytes: int, where: str) -> int:
    """Return the length of a header's JSON, which the first 8 bytes of a file encode."""
    if len(first) < 8 or file_bytes < 8:
        _reject(where, f"has only {file_bytes} bytes, too few for a header")
    length = int.from_bytes(first[:8], "little")
    if length > HEADER_LIMIT_BYTES:
        _reject(where, f"{length}-byte header exceeds the limit of {HEADER_LIMIT_BYTES} bytes")
    if 8 + length > file_bytes:
        _reject(where, f"header needs {length} bytes, but the file ends at byte {file_bytes}")
    return length


def parse_header(
    raw: bytes, file_bytes: int, where: str, interned: Mapping[str, str] | None = None
) -> Header:
    """Validate and parse the JSON of a file's header; the file has ``file_bytes`` bytes.

    To save memory, names that equal a key of ``interned`` reuse the string object of its value.
    """
    document = _parse_json(raw, where)
    metadata = document.pop(METADATA_KEY, None)
    if metadata is None:
        metadata = {}
    elif not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _reject(where, f"{METADATA_KEY} must map strings to strings")
    interned = interned or {}
    entries = [
        (interned.get(name, name), _parse_tensor(name, entry, where))
        for name, entry in document.items()
    ]
    entries.sort(key=lambda entry: (entry[1].begin, entry[1].end))
    position = 0
    for name, tensor in entries:
        if tensor.begin != position:
            kind = "overlaps the previous tensor" if tensor.begin < position else "leaves a hole"
            _reject(
                where,
                f"tensor {name!r} {kind}: it begins at byte {tensor.begin}, expected {position}",
            )
        position = tensor.end
    data_start = 8 + len(raw)
    if data_start + position != file_bytes:
        _reject(
            where,
            f"tensors end at byte {data_start + position}, but the file has {file_bytes} bytes",
        )
    return Header(dict(entries), metadata, data_start, position)


def read_header(path: Path, interned: Mapping[str, str] | None = None) -> Header:
    with path.open("rb") as file, name_file_in_errors(file.fileno()):
        size = os.fstat(file.fileno()).st_size
        length = header_json_bytes(file.read(8), size, str(path))
        raw = file.read(length)
    if len(raw) != length:
        _reject(str(path), "was truncated while it was being read")
    return parse_header(raw, size, str(path), interned)


def format_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the bytes of a header; ``tensors`` are (name, dtype, shape) in buffer order.

    The JSON is padded so that the buffer is aligned to 8 bytes, which GPU loaders prefer.
    """
    document: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in tensors:
        if name in document:
            _reject("new header", f"tensor {name!r} would be written twice")
        end = position + tensor_bytes(dtype, shape)
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > HEADER_LIMIT_BYTES:
        _reject(
            "new header", f"{len(raw)}-byte header exceeds the limit of {HEADER_LIMIT_BYTES} bytes"
        )
    return len(raw).to_bytes(8, "little") + raw


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor; raise ValueError for overflows and partial bytes."""
    bits = DTYPE_BITS[dtype]
    count = 1
    for length in shape:
        count *= length
        if count >= _COUNT_LIMIT:
            raise ValueError("is too large: its number of elements does not fit in 64 bits")
    if count * bits >= _COUNT_LIMIT:
        raise ValueError("is too large: its size in bits overflows a 64-bit integer")
    if count * bits % 8:
        raise ValueError(
            f"has {count} elements of {bits} bits, which is not a whole number of bytes"
        )
    return count * bits // 8


def _reject(where: str, problem: str) -> NoReturn:
    fix = "download the file again, because it is damaged or is not a safetensors file"
    raise ValidationError(where, problem, fix)


def _parse_json(raw: bytes, where: str) -> dict[str, Any]:
    if raw[:1] != b"{":
        _reject(where, "header does not start with '{'")

    def reject_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"name {name!r} appears twice")
        return result

    try:
        document: dict[str, Any] = json.loads(
            raw.decode("utf-8"), object_pairs_hook=reject_repeated_keys
        )
    except UnicodeDecodeError as error:
        _reject(where, f"header is not UTF-8 at byte {8 + error.start}")
    except RecursionError:
        _reject(where, "header is nested too deeply")
    except ValueError as error:
        _reject(where, f"header is not valid JSON: {error}")
    return document


def _parse_tensor(name: str, entry: Any, where: str) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        _reject(where, f"tensor {name!r} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _reject(where, f"tensor {name!r} has unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list):
        _reject(where, f"tensor {name!r} has invalid shape {str(shape)[:60]}")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int and 0 <= offset < _COUNT_LIMIT for offset in offsets)
    ):
        _reject(where, f"tensor {name!r} has invalid data_offsets {str(offsets)[:60]}")
    begin, end = offsets
    try:
        dtype, shape, size = _parse_shape(dtype, str(shape))
    except ValueError as error:
        _reject(where, f"tensor {name!r} {error}")
    if end - begin != size:
        _reject(where, f"tensor {name!r} has {end - begin} bytes, but its shape needs {size}")
    return Tensor(dtype, shape, begin, end)


@lru_cache(maxsize=4096)
def _parse_shape(dtype: str, shape_text: str) -> tuple[str, tuple[int, ...], int]:
    """Return dtype, shape and size in bytes.

    Results are cached, because a model repeats few shapes. The shape is a string, because the
    cache would treat true and 1.0 like 1.
    """
    if not _SHAPE.fullmatch(shape_text):
        raise ValueError(f"has invalid shape {shape_text[:60]}")
    shape = tuple(int(length) for length in re.findall(r"\d+", shape_text))
    return dtype, shape, tensor_bytes(dtype, shape)
