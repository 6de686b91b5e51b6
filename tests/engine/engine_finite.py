"""What the plugin takes for finite; run by the engine's own Python with the plugin on its path."""

from __future__ import annotations

import json
import sys

import torch
from spark_vllm import finite
from vllm.model_executor.model_loader.base_loader import BaseModelLoader


def damaged(dtype: torch.dtype, value: float) -> torch.Tensor:
    """Numbers of which the very last is ``value``."""
    numbers = torch.ones(70, 11, dtype=torch.float32)
    numbers[-1, -1] = value
    return numbers.to(dtype)


def main() -> None:
    """Print the verdicts as JSON."""
    finite._CHUNK_NUMBERS = 100
    nan, infinite = float("nan"), float("inf")
    verdicts = {
        f"{dtype}".removeprefix("torch."): {
            str(value): finite.all_finite(damaged(dtype, value)) for value in (1.0, -448.0, nan)
        }
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
    }
    verdicts["bfloat16"]["inf"] = finite.all_finite(damaged(torch.bfloat16, infinite))
    others = [torch.zeros(0), torch.tensor(1.0), torch.ones(3, dtype=torch.int32)]
    finite.install()
    once = BaseModelLoader.load_model
    finite.install()
    report = {
        "verdicts": verdicts,
        "others": [finite.all_finite(tensor) for tensor in others],
        "wrapped_once": BaseModelLoader.load_model is once,
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
