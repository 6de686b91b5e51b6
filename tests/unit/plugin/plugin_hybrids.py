"""Small hybrid checkpoints for the plugin's tests, written without any code of the plugin.

Tensors are kept as (dtype, shape, bytes), so that no format conversion of a library hides a
mistake; packing and dequantising are spelt out in numpy and serve as the reference.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Raw = tuple[str, tuple[int, ...], bytes]
INDEX = "model.safetensors.index.json"
OVERLAY_FILE = "model-spark-overlay.safetensors"


def read_file(path: Path) -> dict[str, Raw]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: (
            entry["dtype"],
            tuple(entry["shape"]),
            data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
    }


def write_file(path: Path, tensors: dict[str, Raw]) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            stream.write(data)


def bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the BF16 bits of float32 ``values``, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return BF16 ``bits`` as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def raw_bf16(values: NDArray[np.float32]) -> Raw:
    return ("BF16", values.shape, bf16(values).tobytes())


def floats(raw: Raw) -> NDArray[np.float32]:
    """Return a 16-bit or 32-bit float tensor as float32."""
    dtype, shape, data = raw
    if dtype == "BF16":
        return from_bf16(np.frombuffer(data, np.uint16)).reshape(shape)
    kinds: dict[str, Any] = {"F16": np.float16, "F32": np.float32}
    return np.frombuffer(data, kinds[dtype]).astype(np.float32).reshape(shape)


def e4m3_table() -> NDArray[np.float32]:
    """Return the value of each of the 256 codes of FP8 E4M3 (no infinities, two NaNs)."""
    values = np.zeros(256, np.float32)
    for code in range(256):
        sign, exponent, mantissa = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
        lead, power = (0, -6) if exponent == 0 else (1, exponent - 7)
        size = (lead + mantissa / 8) * 2.0**power
        values[code] = np.nan if code & 127 == 127 else sign * size
    return values


def plain_fp8(weight: Raw, scale: Raw) -> Raw:
    """Return the BF16 form of a block-FP8 weight, block 128 x 128, element by element."""
    _, (rows, columns), data = weight
    values = e4m3_table()[np.frombuffer(data, np.uint8)].reshape(rows, columns)
    scales = floats(scale)
    row, column = np.indices((rows, columns))
    return raw_bf16((values * scales[row // 128, column // 128]).astype(np.float32))


def plain_packed(qweight: Raw, scales: Raw, bits: int, group: int = 128) -> Raw:
    """Return the BF16 form ``[out, in]`` of a symmetric GPTQ-packed weight."""
    packed = np.frombuffer(qweight[2], np.uint32).reshape(qweight[1])
    per_word = 32 // bits
    values = np.empty((packed.shape[0] * per_word, packed.shape[1]), np.float32)
    for position in range(per_word):
        field = (packed >> np.uint32(position * bits)) & np.uint32(2**bits - 1)
        values[position::per_word] = field.astype(np.float32) - 2 ** (bits - 1)
    scale = from_bf16(bf16(floats(scales)))  # the engine's kernels use BF16 scales
    return raw_bf16((values * np.repeat(scale, group, axis=0)).T)


def packed_int8(weight: Raw, group: int = 128) -> dict[str, Raw]:
    """Return ``qweight``, ``scales`` and ``qzeros`` of a BF16 weight ``[out, in]``."""
    values = floats(weight).T.reshape(-1, group, weight[1][0])
    scales = from_bf16(bf16(np.abs(values).max(axis=1) / 127))
    codes = np.clip(np.rint(values / scales[:, None]), -127, 127).astype(np.int32) + 128
    codes = codes.reshape(-1, 4, weight[1][0]).astype(np.uint32)
    packed = sum(codes[:, i] << np.uint32(8 * i) for i in range(4)).astype(np.uint32)
    groups, out = scales.shape
    zeros = np.full((groups, out // 4), 0x7F7F7F7F, np.uint32)
    return {
        "qweight": ("I32", packed.shape, packed.tobytes()),
        "scales": raw_bf16(scales),
        "qzeros": ("I32", zeros.shape, zeros.tobytes()),
    }


class Hybrid:
    """A hybrid made from an INT4 base and an FP8 donor tree; ``write`` puts it on disk."""

    def __init__(self, base: Path, donor: Path) -> None:
        self.config: dict[str, Any] = json.loads((base / "config.json").read_text())
        self.extra_files = [
            path for path in base.iterdir() if path.suffix in (".json", ".jinja", ".txt")
        ]
        index = json.loads((base / INDEX).read_text())["weight_map"]
        self.files = {file: read_file(base / file) for file in sorted(set(index.values()))}
        donor_tensors: dict[str, Raw] = {}
        for path in sorted(donor.glob("*.safetensors")):
            donor_tensors.update(read_file(path))
        self.modules = [
            name.removesuffix(".weight")
            for tensors in self.files.values()
            for name in tensors
            if ".mlp.shared_expert." in name and name.startswith("model.language_model.")
        ]
        self.swapped: dict[str, dict[str, Raw]] = {
            module: {
                "weight": donor_tensors[f"{module}.weight"],
                "weight_scale_inv": donor_tensors[f"{module}.weight_scale_inv"],
            }
            for module in self.modules
        }

    def tensor(self, name: str) -> Raw:
        return next(tensors[name] for tensors in self.files.values() if name in tensors)

    def write(self, out: Path, *, layout: str, head: str = "keep") -> Path:
        """Write the checkpoint in ``layout``; return the directory."""
        out.mkdir(parents=True)
        new: dict[str, Raw] = {}
        gone = {f"{module}.weight" for module in self.modules}
        overlay = layout == "overlay"
        for module, parts in self.swapped.items():
            for part, raw in parts.items():
                new[f"{module}.{part}" + ("_fp8" if overlay else "")] = raw
        if head != "keep":
            gone.add("lm_head.weight")
            for part, raw in packed_int8(self.tensor("lm_head.weight")).items():
                new[f"lm_head.{part}" + ("_int8" if overlay else "")] = raw
        index: dict[str, str] = {}
        for file, tensors in self.files.items():
            kept = {name: raw for name, raw in tensors.items() if overlay or name not in gone}
            write_file(out / file, kept)
            index.update({name: file for name in kept if name not in gone})
        write_file(out / OVERLAY_FILE, new)
        index.update(dict.fromkeys(new, OVERLAY_FILE))
        self._write_json(out, index, self._config(layout, head))
        return out

    def write_plain(self, out: Path, *, head: str = "keep") -> Path:
        """Write the same weights as plain BF16, without any quantisation config."""
        out.mkdir(parents=True)
        index: dict[str, str] = {}
        for file, tensors in self.files.items():
            kept = dict(self._plain(tensors, head))
            write_file(out / file, kept)
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
                yield f"{module}.weight", plain_packed(raw, self.tensor(f"{module}.scales"), 4)
            elif module in self.swapped and part == "weight":
                swapped = self.swapped[module]
                yield name, plain_fp8(swapped["weight"], swapped["weight_scale_inv"])
            elif name == "lm_head.weight" and head != "keep":
                packed = packed_int8(raw)
                yield name, plain_packed(packed["qweight"], packed["scales"], 8)
            else:
                yield name, raw

    def _config(self, layout: str, head: str) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(json.dumps(self.config))
        quantization = config["quantization_config"]
        quantization["quant_method"] = "spark_inc"
        quantization["fp8_block"] = {"modules": self.modules, "block_shape": [128, 128]}
        quantization["spark"] = {"layout": layout, "recipe_version": 1, "head": head}
        if head != "keep":
            quantization["extra_config"]["lm_head"] = {
                "bits": 8,
                "group_size": 128,
                "sym": True,
                "data_type": "int",
            }
        return config

    def _write_json(self, out: Path, index: dict[str, str], config: dict[str, Any]) -> None:
        for path in self.extra_files:
            (out / path.name).write_bytes(path.read_bytes())
        # The exporter's second copy of the config would be read as well.
        (out / "quantization_config.json").unlink(missing_ok=True)
        (out / "config.json").write_text(json.dumps(config, indent=1))
        (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
