"""Weights of hybrid checkpoints in plain BF16, computed without code of the plugin."""

import json
import shutil
from pathlib import Path

import numpy as np

from lab.model.safetensors import INDEX
from proofs.trees.build import edit_json
from tests.unit.checkpoint.builder_shards import (
    Raw,
    bf16_tensor,
    bf16_values,
    e4m3_values,
    read_shard,
    write_shard,
)


def dequantise_fp8(weight: Raw, scale: Raw) -> Raw:
    """Return the BF16 form of a block-FP8 weight, block 128 x 128, element by element."""
    values = e4m3_values(np.frombuffer(weight.data, np.uint8)).reshape(weight.shape)
    row, column = np.indices(weight.shape)
    return bf16_tensor((values * bf16_values(scale)[row // 128, column // 128]).astype(np.float32))


def dequantise_packed(qweight: Raw, scales: Raw, bits: int, group: int = 128) -> Raw:
    """Return the BF16 form ``[out, in]`` of a symmetric GPTQ-packed weight."""
    packed = np.frombuffer(qweight.data, np.uint32).reshape(qweight.shape)
    per_word = 32 // bits
    values = np.empty((packed.shape[0] * per_word, packed.shape[1]), np.float32)
    for position in range(per_word):
        field = (packed >> np.uint32(position * bits)) & np.uint32(2**bits - 1)
        values[position::per_word] = field.astype(np.float32) - 2 ** (bits - 1)
    if scales.dtype == "F16":
        floats = np.frombuffer(scales.data, "<f2").astype(np.float32).reshape(scales.shape)
        scales = bf16_tensor(floats)
    return bf16_tensor((values * np.repeat(bf16_values(scales), group, axis=0)).T)


def write_plain(base: Path, donor: Path, out: Path, overlay: Path) -> Path:
    """Write the BF16 form of a hybrid of an INT4 ``base`` and the shared experts of ``donor``.

    An INT8 head is read from ``overlay``.
    """
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("*.safetensors", "quant*.json"))
    index = json.loads((base / INDEX).read_text())["weight_map"]
    files = {file: read_shard(base / file) for file in sorted(set(index.values()))}
    stored = {name: raw for tensors in files.values() for name, raw in tensors.items()}
    donated = {
        name: raw
        for path in donor.glob("*.safetensors")
        for name, raw in read_shard(path).items()
        if name.startswith("model.language_model.") and ".mlp.shared_expert." in name
    }
    head = read_shard(overlay / "model-spark-overlay.safetensors")
    written: dict[str, str] = {}
    for file, tensors in files.items():
        plain = {}
        for name, raw in tensors.items():
            module, _, part = name.rpartition(".")
            if part in ("scales", "qzeros"):
                continue
            name, value = f"{module}.weight", raw
            if part == "qweight":
                value = dequantise_packed(raw, stored[f"{module}.scales"], 4)
            elif name in donated and part == "weight":
                value = dequantise_fp8(donated[name], donated[f"{name}_scale_inv"])
            elif f"{module}.qweight_int8" in head:
                packed, scales = head[f"{module}.qweight_int8"], head[f"{module}.scales_int8"]
                value = dequantise_packed(packed, scales, 8)
            else:
                name = f"{module}.{part}" if module else part
            plain[name] = value
        write_shard(out / file, plain)
        written |= dict.fromkeys(plain, file)
    edit_json(out / "config.json", lambda config: config.pop("quantization_config"))
    edit_json(out / INDEX, lambda index: index.update(weight_map=written))
    return out
