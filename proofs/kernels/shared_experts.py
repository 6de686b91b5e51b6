"""Time the shared experts of the 122B in each weight format and kernel, at batch 1 to 4.

    python3 proofs/kernels/shared_experts.py --out RESULT.json

A call runs the shared expert of 24 layers one after another, so that no weight stays in the L2
cache; times are per layer, medians of CUDA-graph replays. The second table times the routed
experts of eight layers, alone and with the shared expert as a 257th expert. Needs vLLM.
"""

import argparse
import functools
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
EXPERTS, CHOSEN, EXPERT_LAYERS, GROUP = 256, 8, 8, 128
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


def random_experts(count: int) -> SimpleNamespace:
    """Return INT4 experts in Marlin's layout; random words are valid weights."""

    def words(inputs: int, outputs: int) -> Tensor:
        shape = (count, inputs // 16, outputs * 2)
        return torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int32, device="cuda")

    def scales(inputs: int, outputs: int) -> Tensor:
        shape = (count, inputs // GROUP, outputs)
        return (torch.rand(shape, device="cuda") + 0.5).bfloat16() * 0.004

    return SimpleNamespace(
        gate_up=words(HIDDEN, 2 * WIDTH),
        down=words(WIDTH, HIDDEN),
        gate_up_scales=scales(HIDDEN, 2 * WIDTH),
        down_scales=scales(WIDTH, HIDDEN),
    )


def run_experts(x: Tensor, experts: SimpleNamespace, shares: Tensor, chosen: Tensor) -> Tensor:
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    e = experts
    scales = (e.gate_up_scales, e.down_scales)
    return fused_marlin_moe(
        x, e.gate_up, e.down, None, None, *scales, shares, chosen, scalar_types.uint4b8.id
    )


def measure_one_call() -> dict[str, Any]:
    """Time routed experts, routed and shared experts in one and in two calls; all INT4."""
    torch.manual_seed(0)
    layers = [random_experts(EXPERTS + 1) for _ in range(EXPERT_LAYERS)]
    routed, shared = (
        [SimpleNamespace(**{name: tensor[part] for name, tensor in vars(layer).items()})
         for layer in layers]
        for part in (slice(EXPERTS), slice(EXPERTS, None))
    )  # fmt: skip
    results: dict[str, Any] = {}
    for batch in BATCHES:
        x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
        own, first = torch.full((batch, 1), 0.5, device="cuda"), torch.zeros(batch, 1).cuda().int()
        calls: dict[str, list[tuple[Any, ...]]] = {"routed": [], "shared": [], "one call": []}
        for layer, others, one in zip(layers, routed, shared, strict=True):
            shares, ids = torch.randn(batch, EXPERTS, device="cuda").softmax(1).topk(CHOSEN)
            calls["routed"].append((others, shares, ids.int()))
            calls["shared"].append((one, own, first))
            all_ids = torch.cat([ids.int(), first + EXPERTS], 1)
            calls["one call"].append((layer, torch.cat([shares, own], 1), all_ids))

        def run(way: str, x: Tensor = x, calls: dict[str, Any] = calls) -> list[Tensor]:
            return [run_experts(x, *call) for call in calls[way]]

        def two_calls(run: Callable[[str], list[Tensor]] = run) -> list[Tensor]:
            return [a + b for a, b in zip(run("routed"), run("shared"), strict=True)]

        errors = [
            float((a.float() - b.float()).norm() / b.float().norm())
            for a, b in zip(run("one call"), two_calls(), strict=True)
        ]
        works = {way: functools.partial(run, way) for way in calls} | {"two calls": two_calls}
        results[str(batch)] = {
            **{way: round(graph_us(work, 2) / EXPERT_LAYERS, 2) for way, work in works.items()},
            "largest_difference": round(max(errors), 5),
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
        "with_routed_experts": {
            "shape": {"experts": EXPERTS, "chosen": CHOSEN, "layers_in_turn": EXPERT_LAYERS},
            "us_per_layer": measure_one_call(),
        },
        "rows": [],
    }
    write_result(arguments.out, document)


if __name__ == "__main__":
    main()
