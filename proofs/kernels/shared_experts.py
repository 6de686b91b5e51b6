"""Time the shared experts of the 122B in each weight format and kernel, at batch 1 to 4.

    python3 proofs/kernels/shared_experts.py --out RESULT.json

A call runs the shared expert of 24 layers one after another, so that no weight stays in the L2
cache; times are per layer, medians of CUDA-graph replays. Needs vLLM.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "files" / "image")]

from spark_vllm.head.compute import make_marlin_head, quantize_rows  # noqa: E402 # path above
from timing import graph_us, read_gb_per_s  # noqa: E402

HIDDEN, WIDTH, LAYERS, BLOCK = 3072, 1024, 24, 128
BATCHES = (1, 2, 3, 4)
Linear = Callable[[Any], Tensor]


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return values, scales


def make_fp8_marlin(values: Tensor, scales: Tensor) -> Linear:
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp8

    layer = torch.nn.Module()
    rows, columns = values.shape
    layer.output_size_per_partition, layer.input_size_per_partition = rows, columns
    layer.weight_block_size, layer.orig_dtype = [BLOCK, BLOCK], torch.bfloat16
    layer.weight = torch.nn.Parameter(values, requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
    marlin_utils_fp8.prepare_fp8_layer_for_marlin(layer, size_k_first=False)
    scratch = marlin_utils.marlin_make_workspace_new(values.device)
    return lambda x: marlin_utils_fp8.apply_fp8_marlin_linear(
        x, layer.weight, layer.weight_scale_inv, scratch, rows, columns, None
    )


def make_products(weight: Tensor) -> dict[str, Linear]:
    """Return the products of a weight by format; those of FP8 take (values, scales)."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm

    values, scales = quantize_fp8(weight)
    return {
        "bf16": lambda x: x @ weight.t(),
        "fp8-cutlass": lambda x: ops.cutlass_scaled_mm(
            x[0], values.t(), x[1], scales.t(), torch.bfloat16
        ),
        "fp8-triton": lambda x: w8a8_triton_block_scaled_mm(
            x[0], values, x[1], scales, [BLOCK, BLOCK], torch.bfloat16
        ),
        "fp8-marlin": make_fp8_marlin(values, scales),
        "int8-marlin": make_marlin_head(*quantize_rows(weight)),
    }


def steps(way: str) -> SimpleNamespace:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    def silu(x: Tensor) -> Tensor:
        out = torch.empty(len(x), WIDTH, dtype=x.dtype, device=x.device)
        torch.ops._C.silu_and_mul(out, x)
        return out

    columns = way.startswith("fp8-cutlass")

    def quantize(x: Tensor) -> Any:
        return per_token_group_quant_fp8(x, BLOCK, column_major_scales=columns, use_ue8m0=False)

    def fused(x: Tensor) -> Any:
        return ops.silu_and_mul_per_block_quant(
            x, BLOCK, torch.float8_e4m3fn, is_scale_transposed=columns
        )

    if way.endswith(" fused"):
        return SimpleNamespace(before=quantize, between=fused)
    if way in ("fp8-cutlass", "fp8-triton"):
        return SimpleNamespace(before=quantize, between=lambda x: quantize(silu(x)))
    return SimpleNamespace(before=lambda x: x, between=silu)


def measure() -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    layers = [
        [torch.randn(shape, device="cuda").bfloat16() * 0.02 for shape in shapes]
        for _ in range(LAYERS)
    ]
    products = [[make_products(weight) for weight in layer] for layer in layers]
    results: dict[str, Any] = {}
    for way in ("bf16", "fp8-cutlass", "fp8-cutlass fused", "fp8-triton", "fp8-triton fused",
                "fp8-marlin", "int8-marlin"):  # fmt: skip
        step, kernel = steps(way), way.partition(" ")[0]
        results[way] = {}
        for batch in BATCHES:
            x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
            ready = [step.before(x), step.between(torch.randn_like(x[:, : 2 * WIDTH]))]

            def experts(x: Tensor = x, step: Any = step, kernel: str = kernel) -> Tensor:
                for up, down in products:
                    out = down[kernel](step.between(up[kernel](step.before(x))))
                return out

            def only_products(ready: list[Any] = ready, kernel: str = kernel) -> None:
                for layer in products:
                    for product, input_ in zip(layer, ready, strict=True):
                        product[kernel](input_)

            up, down = layers[-1]
            gate, value = (x.float() @ up.float().t()).chunk(2, -1)
            expected = (torch.nn.functional.silu(gate) * value) @ down.float().t()
            results[way][str(batch)] = {
                "us": round(graph_us(experts, 2) / LAYERS, 2),
                "products_us": round(graph_us(only_products, 2) / LAYERS, 2),
                "error": round(float((experts().float() - expected).norm() / expected.norm()), 4),
            }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    from proofs.result_files import write_result
    from proofs.stages import environment

    document = {
        "command": "python3 proofs/kernels/shared_experts.py",
        "seed": 0,
        **environment(),
        "shape": {"hidden": HIDDEN, "width": WIDTH, "layers_in_turn": LAYERS},
        "read_gb_per_s": round(read_gb_per_s(1 << 32)),
        "us_per_layer": measure(),
        "rows": [],
    }
    write_result(arguments.out, document)


if __name__ == "__main__":
    main()
