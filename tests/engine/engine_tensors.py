"""Compare every tensor of hybrids with plain trees, bit for bit; run by the engine's own Python.

Arguments: pairs of a hybrid's directory and the directory of the same weights in plain BF16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from spark_vllm.checkpoint.headers import INDEX
from spark_vllm.checkpoint.reader import ModuleReader
from spark_vllm.checkpoint.settings import read_settings


def compare(hybrid: Path, plain: Path) -> int:
    settings = read_settings(
        json.loads((hybrid / "config.json").read_text())["quantization_config"]
    )
    index = json.loads((plain / INDEX).read_text())["weight_map"]
    names = set()
    for name, tensor in ModuleReader(hybrid, settings).read_weights(lambda _: True):
        with safe_open(str(plain / index[name]), framework="pt") as file:
            expected = file.get_tensor(name)
        if tensor.dtype != expected.dtype or not torch.equal(tensor, expected):
            raise SystemExit(f"{hybrid}: {name} differs from {plain}")
        names.add(name)
    if names != set(index):
        raise SystemExit(f"{hybrid}: other names than {plain}: {sorted(names ^ set(index))[:5]}")
    return len(names)


if __name__ == "__main__":
    pairs = list(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    counts = [compare(Path(hybrid), Path(plain)) for hybrid, plain in pairs]
    sys.stdout.write(f"{json.dumps(counts)}\n")
