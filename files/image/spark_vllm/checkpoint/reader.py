"""Read a hybrid checkpoint as plain BF16 tensors, without vLLM."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from spark_vllm.checkpoint import names
from spark_vllm.checkpoint.headers import INDEX
from spark_vllm.checkpoint.settings import Settings

# Values are computed in float32 and rounded once. Scales are rounded to BF16 first, like those of
# the engine's kernels, so that portable mode gives the same answers.

INT32_BITS = 32


def infer_bits(qweight: torch.Tensor, scales: torch.Tensor, group_size: int) -> int:
    """Return the bit width of a GPTQ-packed weight, computed from the shapes.

    Raise ValueError if the shapes match neither 4 nor 8 bits.
    """
    in_features = scales.shape[0] * group_size
    bits, rest = divmod(INT32_BITS * int(qweight.shape[0]), int(in_features))
    if rest or bits not in (4, 8) or qweight.shape[1] != scales.shape[1]:
        raise ValueError(
            f"qweight {list(qweight.shape)} and scales {list(scales.shape)} "
            f"do not form a 4-bit or 8-bit weight of group size {group_size}"
        )
    return bits


def unpack_gptq(qweight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the signed integers, ``[in, out]``, of a symmetric GPTQ-packed weight.

    ``qweight`` is int32 ``[in * bits / 32, out]`` with the first input in the lowest bits; values
    are stored with the bias ``2 ** (bits - 1)``.
    """
    shifts = torch.arange(0, INT32_BITS, bits, dtype=torch.int32)
    values = (qweight.unsqueeze(1) >> shifts.view(1, -1, 1)) & (2**bits - 1)
    return (values - 2 ** (bits - 1)).to(torch.int16).flatten(0, 1)


def dequantize_gptq(qweight: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return the BF16 weight ``[out, in]``; ``scales`` are 16-bit ``[in / group_size, out]``."""
    values = unpack_gptq(qweight, infer_bits(qweight, scales, group_size))
    grouped = values.view(scales.shape[0], group_size, -1).float()
    grouped *= scales.to(torch.bfloat16).float().unsqueeze(1)
    return grouped.flatten(0, 1).t().to(torch.bfloat16).contiguous()


def dequantize_fp8_blocks(
    weight: torch.Tensor, scale: torch.Tensor, block_shape: tuple[int, int]
) -> torch.Tensor:
    """Return the BF16 form of a float8_e4m3fn weight ``[out, in]``.

    ``scale`` is BF16 or FP32 ``[ceil(out / rows), ceil(in / columns)]``.
    """
    rows, columns = block_shape
    out_features, in_features = weight.shape
    expected = (-(-out_features // rows), -(-in_features // columns))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"block scales have shape {list(scale.shape)}, but the weight needs {list(expected)}"
        )
    full_scale = scale.float().repeat_interleave(rows, 0)[:out_features]
    full_scale = full_scale.repeat_interleave(columns, 1)[:, :in_features]
    return (weight.float() * full_scale).to(torch.bfloat16)


class ModuleReader:
    """Reads tensors by plain name and dequantizes modules, at most one in float32 at a time."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        index = json.loads((directory / INDEX).read_text())["weight_map"]
        self._directory = directory
        self._settings = settings
        self._files: dict[str, safe_open] = {}
        self._stored: dict[str, tuple[str, str]] = {}  # plain name -> (file, stored name)
        rules = settings.rules
        for stored, file in sorted(index.items(), key=lambda item: (item[1], item[0])):
            plain = names.rename(stored, rules)
            if plain is not None:
                self._stored[plain] = (file, stored)
        self.counts: Counter[str] = Counter()

    def read_weights(self, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
        for plain in self._stored:
            module, _, part = plain.rpartition(".")
            name = f"{module}.weight" if part == "qweight" else plain
            if not self._is_helper(module, part) and is_wanted(name):
                yield name, self._read_module(module, part)

    def _is_helper(self, module: str, part: str) -> bool:
        """Return whether the tensor only serves to dequantize another tensor."""
        if f"{module}.qweight" in self._stored:
            return part in ("scales", "qzeros", "g_idx")
        return part == "weight_scale_inv"

    def _read_module(self, module: str, part: str) -> torch.Tensor:
        try:
            if part == "qweight":
                qweight, scales = self._read(f"{module}.qweight"), self._read(f"{module}.scales")
                group_size = self._settings.group_size
                self.counts[f"int{infer_bits(qweight, scales, group_size)}"] += 1
                return dequantize_gptq(qweight, scales, group_size)
            if part == "weight" and f"{module}.weight_scale_inv" in self._stored:
                weight = self._read(f"{module}.weight")
                scale = self._read(f"{module}.weight_scale_inv")
                self.counts["fp8"] += 1
                return dequantize_fp8_blocks(weight, scale, self._settings.block_shape)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{self._directory}: {module}: {error}; fix: build the checkpoint again"
            ) from error
        return self._read(f"{module}.{part}" if module else part)

    def _read(self, plain: str) -> torch.Tensor:
        file, stored = self._stored[plain]
        if file not in self._files:
            self._files[file] = safe_open(str(self._directory / file), framework="pt")
        tensor: torch.Tensor = self._files[file].get_tensor(stored)  # type: ignore[no-untyped-call] # safetensors has no hints there
        return tensor
