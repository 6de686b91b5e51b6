"""A hybrid checkpoint read as plain BF16 tensors; needs torch and safetensors, not vLLM."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from spark_vllm.checkpoint import dequantise, names
from spark_vllm.checkpoint.headers import INDEX
from spark_vllm.checkpoint.settings import Settings


class ModuleReader:
    """Reads tensors of one checkpoint by their plain names, and dequantises whole modules.

    Files are memory-mapped and only the tensors of the module at hand are copied, so the peak is
    one module in float32.
    """

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

    def weights(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (plain name, tensor) of all modules with a ``wanted`` name."""
        for plain in self._stored:
            module, _, part = plain.rpartition(".")
            name = f"{module}.weight" if part == "qweight" else plain
            if not self._is_part(module, part) and wanted(name):
                yield name, self._weight(module, part)

    def _is_part(self, module: str, part: str) -> bool:
        """Return whether this tensor only serves to dequantise another one."""
        if f"{module}.qweight" in self._stored:
            return part in ("scales", "qzeros", "g_idx")
        return part == "weight_scale_inv"

    def _weight(self, module: str, part: str) -> torch.Tensor:
        try:
            if part == "qweight":
                qweight, scales = self._read(f"{module}.qweight"), self._read(f"{module}.scales")
                group_size = self._settings.group_size
                self.counts[f"int{dequantise.packed_bits(qweight, scales, group_size)}"] += 1
                return dequantise.gptq_weight(qweight, scales, group_size)
            if part == "weight" and f"{module}.weight_scale_inv" in self._stored:
                weight = self._read(f"{module}.weight")
                scale = self._read(f"{module}.weight_scale_inv")
                self.counts["fp8"] += 1
                return dequantise.fp8_block_weight(weight, scale, self._settings.block_shape)
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
