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
    finite.check_model(model, finite.modules_from_target(model))


def scales(last: float = 0.01) -> torch.Tensor:
    numbers = torch.linspace(0.002, 0.02, 64 * 30).reshape(64, 30) * torch.tensor([1.0, -1.0] * 15)
    numbers = torch.nn.functional.pad(numbers, (0, 2, 0, 3))
    numbers[40, 7] = last
    return numbers.to(torch.float16)


class Quantised(torch.nn.Module):
    def __init__(self, last: float = 0.01) -> None:
        super().__init__()
        self.w13_scales = torch.nn.Parameter(scales(last), requires_grad=False)


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
            "usual": finite.has_plausible_scales(scales()),
            "ten times as large": finite.has_plausible_scales(scales(last=0.2)),
            "ten thousand times as large": finite.has_plausible_scales(scales(last=-100.0)),
            "none": finite.has_plausible_scales(torch.zeros(0)),
            "only zeros": finite.has_plausible_scales(torch.zeros(200)),
        },
        "layers": [refusal(finite.check_scale_sizes, Quantised(last)) for last in (0.01, 100.0)],
        "drafters": {
            "head loaded later": refusal(check_drafter, Drafter(layer=1.0, head=nan)),
            "damaged layer": refusal(check_drafter, Drafter(layer=nan, head=1.0)),
            "damaged own head": refusal(check_drafter, own),
        },
        "modules_without_flags": finite.modules_from_target(torch.nn.Linear(3, 3)),
        "verdicts": verdicts,
        "others": [finite.is_finite(tensor) for tensor in others],
        "wrapped_once": BaseModelLoader.load_model is wrapped,
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
