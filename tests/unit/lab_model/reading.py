"""Reads the generator's files by the formats' definitions, without the generator's code."""

import json
from pathlib import Path

import numpy as np
from safetensors import deserialize


def read_tree(directory: Path) -> dict[str, dict]:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        for name, tensor in deserialize((directory / file).read_bytes()):
            if name in found:
                raise ValueError(f"{name} is stored twice")
            found[name] = {**tensor, "file": file}
    return found


def as_float(tensor: dict) -> np.ndarray:
    data, shape = bytes(tensor["data"]), tensor["shape"]
    if tensor["dtype"] == "BF16":
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif tensor["dtype"] == "F8_E4M3":
        values = E4M3[np.frombuffer(data, np.uint8)]
    else:
        values = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[tensor["dtype"]])
    return values.astype(np.float32).reshape(shape)


def _e4m3(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([_e4m3(code) for code in range(256)], dtype=np.float32)


def int4_as_float(tree: dict[str, dict], module: str) -> np.ndarray:
    qweight = tree[f"{module}.qweight"]
    qzeros = tree[f"{module}.qzeros"]
    packed = np.frombuffer(bytes(qweight["data"]), "<u4").reshape(qweight["shape"])
    packed_zeros = np.frombuffer(bytes(qzeros["data"]), "<u4").reshape(qzeros["shape"])
    scales = as_float(tree[f"{module}.scales"])
    inputs, outputs = packed.shape[0] * 8, packed.shape[1]
    weight = np.empty((outputs, inputs), np.float32)
    for row in range(inputs):
        codes = (packed[row // 8] >> (4 * (row % 8))) & 15
        group = row // 128
        columns = np.arange(outputs)
        zeros = ((packed_zeros[group, columns // 8] >> (4 * (columns % 8))) & 15) + 1
        weight[:, row] = (codes.astype(np.int64) - zeros) * scales[group]
    return weight


def fp8_as_float(tree: dict[str, dict], module: str) -> np.ndarray:
    weight = as_float(tree[f"{module}.weight"])
    scales = as_float(tree[f"{module}.weight_scale_inv"])
    spread = scales.repeat(128, axis=0).repeat(128, axis=1)
    return weight * spread[: weight.shape[0], : weight.shape[1]]
