"""Check the plugin's finite-number rules; run by the engine's Python with the plugin on path."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from spark_vllm import finite
from vllm.model_executor.model_loader.base_loader import BaseModelLoader


def damaged(dtype: torch.dtype, value: float) -> torch.Tensor:
    numbers = torch.ones(70, 11, dtype=torch.float32)
    numbers[-1, -1] = value
    return numbers.to(dtype)


class Drafter(torch.nn.Module):
    has_own_lm_head = False
    has_own_embed_tokens = False

    def __init__(self, *, layer: float, head: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.lm_head = torch.nn.Linear(3, 5, bias=False)
        with torch.no_grad():
            self.layer.weight.fill_(layer)
            self.lm_head.weight.fill_(head)


def refusal(check: Callable[..., object], *arguments: object) -> str:
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def check_drafter(model: torch.nn.Module) -> None:
    finite.check_model(model, finite.modules_shared_with_target(model))


def scales(factor: float = 1.0) -> torch.Tensor:
    """Return signed scales with padding, a third of the groups zero as AutoRound writes them."""
    numbers = torch.linspace(0.002, 0.02, 64 * 30).reshape(64, 30) * torch.tensor([1.0, -1.0] * 15)
    numbers[::3] = 1e-5
    return torch.nn.functional.pad(factor * numbers, (0, 2, 0, 3)).to(torch.float16)


class Layer(torch.nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.w13_scales = torch.nn.Parameter(values, requires_grad=False)


def quantized(first: torch.Tensor) -> torch.nn.Module:
    layers = [Layer(values) for values in (first, scales(), scales(), scales())]
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})


def changed(value: float) -> torch.Tensor:
    values = scales()
    values[40, 7] = value
    return values


def main() -> None:
    finite._CHUNK_NUMBERS = 100
    nan, infinite = float("nan"), float("inf")
    verdicts = {
        f"{dtype}".removeprefix("torch."): {
            str(value): finite.is_finite(damaged(dtype, value)) for value in (1.0, -448.0, nan)
        }
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
    }
    verdicts["bfloat16"]["inf"] = finite.is_finite(damaged(torch.bfloat16, infinite))
    others = [torch.zeros(0), torch.tensor(1.0), torch.ones(3, dtype=torch.int32)]
    finite.install()
    wrapped = BaseModelLoader.load_model
    finite.install()
    own = Drafter(layer=1.0, head=nan)
    own.has_own_lm_head = True
    report = {
        "scales": {
            name: refusal(finite.check_scale_sizes, quantized(values))
            for name, values in {
                "usual": scales(),
                "twice as large": scales(2.0),
                "ten times as large at one place": changed(-0.2),
                "almost zero at one place": changed(2e-5),
                "all zero": torch.zeros(67, 32, dtype=torch.float16),
                "none": torch.zeros(0, dtype=torch.float16),
                "an INT8 group of zeros": changed(1.0),
                "512 times as large at one place": changed(-512 * 0.01),
                "512 times as large": scales(512.0),
                "32 times as small": scales(1 / 32),
            }.items()
        },
        "drafters": {
            "head loaded later": refusal(check_drafter, Drafter(layer=1.0, head=nan)),
            "damaged layer": refusal(check_drafter, Drafter(layer=nan, head=1.0)),
            "damaged own head": refusal(check_drafter, own),
        },
        "modules_without_flags": finite.modules_shared_with_target(torch.nn.Linear(3, 3)),
        "verdicts": verdicts,
        "others": [finite.is_finite(tensor) for tensor in others],
        "wrapped_once": BaseModelLoader.load_model is wrapped,
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
