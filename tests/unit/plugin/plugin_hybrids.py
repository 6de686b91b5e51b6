"""Small hybrid checkpoints, written without code of the plugin, and their weights in plain BF16."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.unit.checkpoint.builder_shards import (
    Raw,
    bf16_tensor,
    bf16_values,
    e4m3_values,
    read_shard,
    write_shard,
)

INDEX = "model.safetensors.index.json"
OVERLAY_FILE = "model-spark-overlay.safetensors"


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return bf16_values(bf16_tensor(values))


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


def pack_int8(weight: Raw, group: int = 128) -> dict[str, Raw]:
    """Return ``qweight``, ``scales`` and ``qzeros`` of a BF16 weight ``[out, in]``."""
    out = weight.shape[0]
    values = bf16_values(weight).T.reshape(-1, group, out)
    scales = round_to_bf16(np.abs(values).max(axis=1) / 127)
    codes = np.clip(np.rint(values / scales[:, None]), -127, 127).astype(np.int32) + 128
    codes = codes.reshape(-1, 4, out).astype(np.uint32)
    packed = sum(codes[:, i] << np.uint32(8 * i) for i in range(4)).astype(np.uint32)
    zeros = np.full((len(scales), out // 4), 0x7F7F7F7F, np.uint32)
    return {
        "qweight": Raw("I32", packed.shape, packed.tobytes()),
        "scales": bf16_tensor(scales),
        "qzeros": Raw("I32", zeros.shape, zeros.tobytes()),
    }


class Hybrid:
    """A hybrid made from an INT4 base and an FP8 donor tree; ``write`` puts it on disk."""

    def __init__(self, base: Path, donor: Path) -> None:
        self.config: dict[str, Any] = json.loads((base / "config.json").read_text())
        self.extra_files = [
            path for path in base.iterdir() if path.suffix in (".json", ".jinja", ".txt")
        ]
        index = json.loads((base / INDEX).read_text())["weight_map"]
        self.files = {file: read_shard(base / file) for file in sorted(set(index.values()))}
        donor_tensors: dict[str, Raw] = {}
        for path in sorted(donor.glob("*.safetensors")):
            donor_tensors.update(read_shard(path))
        self.modules = [
            name.removesuffix(".weight")
            for tensors in self.files.values()
            for name in tensors
            if ".mlp.shared_expert." in name and name.startswith("model.language_model.")
        ]
        self.swapped: dict[str, dict[str, Raw]] = {
            module: {
                part: donor_tensors[f"{module}.{part}"] for part in ("weight", "weight_scale_inv")
            }
            for module in self.modules
        }

    def tensor(self, name: str) -> Raw:
        return next(tensors[name] for tensors in self.files.values() if name in tensors)

    def write(self, out: Path, *, layout: str, head: str = "keep") -> Path:
        out.mkdir(parents=True)
        new: dict[str, Raw] = {}
        gone = {f"{module}.weight" for module in self.modules}
        overlay = layout == "overlay"
        for module, parts in self.swapped.items():
            for part, raw in parts.items():
                new[f"{module}.{part}" + ("_fp8" if overlay else "")] = raw
        if head != "keep":
            gone.add("lm_head.weight")
            for part, raw in pack_int8(self.tensor("lm_head.weight")).items():
                new[f"lm_head.{part}" + ("_int8" if overlay else "")] = raw
        index: dict[str, str] = {}
        for file, tensors in self.files.items():
            kept = {name: raw for name, raw in tensors.items() if overlay or name not in gone}
            write_shard(out / file, kept)
            index.update({name: file for name in kept if name not in gone})
        write_shard(out / OVERLAY_FILE, new)
        index.update(dict.fromkeys(new, OVERLAY_FILE))
        self._write_json(out, index, self._config(layout, head))
        return out

    def write_plain(self, out: Path, *, head: str = "keep") -> Path:
        out.mkdir(parents=True)
        index: dict[str, str] = {}
        for file, tensors in self.files.items():
            kept = dict(self._plain(tensors, head))
            write_shard(out / file, kept)
            index.update(dict.fromkeys(kept, file))
        config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        self._write_json(out, index, config)
        return out

    def _plain(self, tensors: dict[str, Raw], head: str) -> Any:
        for name, raw in tensors.items():
            module, _, part = name.rpartition(".")
            if part in ("scales", "qzeros"):
                continue
            if part == "qweight":
                yield f"{module}.weight", dequantise_packed(raw, self.tensor(f"{module}.scales"), 4)
            elif module in self.swapped and part == "weight":
                swapped = self.swapped[module]
                yield name, dequantise_fp8(swapped["weight"], swapped["weight_scale_inv"])
            elif name == "lm_head.weight" and head != "keep":
                packed = pack_int8(raw)
                yield name, dequantise_packed(packed["qweight"], packed["scales"], 8)
            else:
                yield name, raw

    def _config(self, layout: str, head: str) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(json.dumps(self.config))
        quantization = config["quantization_config"]
        quantization["quant_method"] = "spark_inc"
        quantization["fp8_block"] = {"modules": self.modules, "block_shape": [128, 128]}
        quantization["spark"] = {"layout": layout, "recipe_version": 1, "head": head}
        if head != "keep":
            int8 = {"bits": 8, "group_size": 128, "sym": True, "data_type": "int"}
            quantization["extra_config"]["lm_head"] = int8
        return config

    def _write_json(self, out: Path, index: dict[str, str], config: dict[str, Any]) -> None:
        for path in self.extra_files:
            (out / path.name).write_bytes(path.read_bytes())
        (out / "quantization_config.json").unlink(missing_ok=True)
        (out / "config.json").write_text(json.dumps(config, indent=1))
        (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
