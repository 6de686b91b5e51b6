"""Number formats by definition and shards by the safetensors package, without our own code."""

import hashlib
import json
from typing import NamedTuple

import numpy as np
from safetensors import TensorSpec, safe_open, serialize

BLOCK = 128

SERIAL = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "I32": "int32",
    "F8_E4M3": "float8_e4m3fn",
}
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1}


class Raw(NamedTuple):
    dtype: str
    shape: tuple
    data: bytes


def bf16(values):
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def bf16_tensor(values):
    return Raw("BF16", tuple(values.shape), bf16(values).tobytes())


def bf16_values(raw):
    bits = np.frombuffer(raw.data, "<u2").astype(np.uint32) << 16
    return bits.view(np.float32).reshape(raw.shape)


def _e4m3_table():
    table = [mantissa * 2.0**-9 for mantissa in range(8)]
    table += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return np.array(table[:127], np.float64)


E4M3 = _e4m3_table()


def e4m3_codes(values):
    magnitude = np.abs(values).astype(np.float64).ravel()
    upper = np.clip(np.searchsorted(E4M3, magnitude), 1, 126)
    low, high = E4M3[upper - 1], E4M3[upper]
    down, up = magnitude - low, high - magnitude
    take_up = (up < down) | ((up == down) & (upper % 2 == 0))
    codes = np.where(take_up, upper, upper - 1).astype(np.uint8)
    return (codes | np.where(np.signbit(values).ravel(), 0x80, 0).astype(np.uint8)).reshape(
        values.shape
    )


def e4m3_values(codes):
    values = E4M3[np.minimum(codes & 0x7F, 126)]
    return np.where(codes & 0x80, -values, values)


def fp8_pair(values):
    rows, columns = values.shape
    grid = (-(-rows // BLOCK), -(-columns // BLOCK))
    codes, scales = np.zeros(values.shape, np.uint8), np.zeros(grid, "<u2")
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = bf16(np.abs(values[part]).max() / np.float32(448))[0]
            scale = (scales[i, j].astype(np.uint32) << 16).view(np.float32)
            codes[part] = e4m3_codes(np.clip(values[part] / scale, -448, 448))
    return Raw("F8_E4M3", values.shape, codes.tobytes()), Raw("BF16", grid, scales.tobytes())


def write_shard(path, tensors, metadata=None):
    alive = {name: np.frombuffer(raw.data, np.uint8) for name, raw in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=SERIAL[raw.dtype],
            shape=raw.shape,
            data_ptr=alive[name].ctypes.data,
            data_len=len(raw.data),
        )
        for name, raw in tensors.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(serialize(specs, metadata=metadata or {"format": "pt"})))


def write_shard_by_hand(path, tensors):
    header, position = {}, 0
    for name, raw in tensors.items():
        end = position + len(raw.data)
        offsets = [position, end]
        header[name] = {"dtype": raw.dtype, "shape": list(raw.shape), "data_offsets": offsets}
        position = end
    text = json.dumps(header).encode()
    body = b"".join(raw.data for raw in tensors.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def read_shard(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {
        name: Raw(e["dtype"], tuple(e["shape"]), body[slice(*e["data_offsets"])])
        for name, e in header.items()
    }


def readable_by_safetensors(path):
    with safe_open(path, "numpy") as file:
        return set(file.keys())


class Bytes:
    """Pseudo-random bytes, independent of library versions."""

    def __init__(self, seed):
        self._seed, self._calls = seed, 0

    def bytes(self, count):
        self._calls += 1
        return hashlib.shake_128(f"{self._seed}/{self._calls}".encode()).digest(count)
