"""Time the INT8 LM head, Marlin and BF16 on this machine, and measure accuracy.

    python3 proofs/kernels/lm_head.py --out RESULT.json

Times are medians of CUDA-graph replays. Floors: bytes of the INT8 weight over the rate of a read of
that size, and of a long read. ``DISABLE_MMA_V3=1 --tiles 12.1`` imitates a Spark. Needs vLLM.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "files" / "image")]

from spark_vllm.head.choice import (  # noqa: E402 # after the path above
    Tile,
    list_head_batches,
    read_table,
    select_fastest,
    tile_for,
)
from spark_vllm.head.compute import (  # noqa: E402
    Head,
    make_marlin_head,
    measure_kernels,
    quantize_rows,
)
from spark_vllm.head.kernel import logits  # noqa: E402
from timing import graph_us, read_gb_per_s  # noqa: E402

SHAPES = ((248320, 3072), (248320, 2048), (248320, 4096), (32768, 3072))
"""Rows and inputs: heads of the 122B, 35B and 397B, and the draft vocabulary of profile v3."""
BATCHES = (1, 2, 3, 4, 8, 9, 12, 16, 24, 32, 48, 64, 128, 256, 512)
SERVED_BATCHES = list_head_batches(4, 2)
"""Of a profile with four sequences and two drafts."""
SPARK_PROCESSORS = 48
SPARK_GB_PER_S = 273


def accuracy(weight: torch.Tensor, heads: dict[str, Head], batch: int) -> dict[str, Any]:
    """Return error against float64 and disagreements of the top token beyond the error."""
    torch.manual_seed(1)
    x = torch.randn(batch, weight.shape[1], device="cuda").bfloat16()
    reference = torch.cat([x.double() @ block.double().t() for block in weight.split(16384)], 1)
    top = reference.topk(2, dim=-1)
    margin = top.values[:, 0] - top.values[:, 1]
    results: dict[str, Any] = {}
    for name, head in heads.items():
        value = head(x).double()
        usual = 1.4826 * (value - reference).abs().median(-1).values
        differ = value.argmax(-1) != top.indices[:, 0]
        results[name] = {
            "error": round(float((value - reference).norm() / reference.norm()), 6),
            "top_differs": int(differ.sum()),
            "beyond_margin": int((differ & (margin > 12 * usual)).sum()),
        }
    return results


def make_heads(
    weight: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, tiles: Sequence[Tile]
) -> dict[str, Head]:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "bf16": lambda x: x @ weight.t(),
        "own": lambda x: logits(x, values, scales, tile_for(x.shape[0], tiles), processors),
        "marlin": make_marlin_head(values, scales),
    }


def measure(rows: int, in_features: int, tiles_name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(rows, in_features, device="cuda").bfloat16()
    values, scales = quantize_rows(weight)
    tiles = read_table()[tiles_name]
    heads = make_heads(weight, values, scales, tiles)
    times: dict[str, dict[int, float]] = {name: {} for name in heads}
    for batch in BATCHES:
        x = torch.randn(batch, in_features, device="cuda").bfloat16()
        for name, head in heads.items():
            times[name][batch] = round(graph_us(lambda h=head, x=x: h(x)), 2)
    same_size, long_read = read_gb_per_s(values.nbytes), read_gb_per_s(1 << 32)
    floors = {
        "same_size_us": round(values.nbytes / same_size / 1000, 2),
        "long_read_us": round(values.nbytes / long_read / 1000, 2),
    }
    result: dict[str, Any] = {
        "inputs": in_features,
        "rows": rows,
        "int8_bytes": values.nbytes,
        "scale_bytes": scales.nbytes,
        "read_gb_per_s": {"same_size": round(same_size), "long_read": round(long_read)},
        "floors": floors,
        "us": times,
        "over_floor": {
            batch: {name: round(times["own"][batch] / us, 3) for name, us in floors.items()}
            for batch in (1, 16)
        },
        "parts": time_new_outputs(values, scales, in_features, tiles),
        "accuracy": {"gaussian": accuracy(weight, heads, 64)},
    }
    if (rows, in_features) == SHAPES[0]:
        result["limited"] = limited(values, scales, in_features)
    served = measure_kernels(weight, values, scales, SERVED_BATCHES)
    result["served"] = {"us": served, "choice": select_fastest(served)}
    return result


def time_new_outputs(
    values: torch.Tensor, scales: torch.Tensor, in_features: int, tiles: Sequence[Tile]
) -> dict[str, Any]:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    results: dict[str, Any] = {}
    for batch in (1, 16):
        tile = tile_for(batch, tiles)
        x = torch.randn(batch, in_features, device="cuda").bfloat16()
        us = graph_us(
            lambda t=tile, x=x: logits(x, values, scales, t, processors), 16, new_outputs=True
        )
        results[str(batch)] = {"each output in new memory": round(us, 2)}
    return results


def heavy_tailed(in_features: int, tiles_name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    heavy = torch.distributions.StudentT(torch.tensor(3.0, device="cuda")).sample(
        (65536, in_features)
    )
    heavy = heavy.bfloat16()
    heads = make_heads(heavy, *quantize_rows(heavy), read_table()[tiles_name])
    return accuracy(heavy, heads, 64)


def limited(values: torch.Tensor, scales: torch.Tensor, in_features: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for batch in (1, 3, 12, 64):
        tile = dataclasses.replace(tile_for(batch, read_table()["12.1"]), programs_per_processor=1)
        x = torch.randn(batch, in_features, device="cuda").bfloat16()
        time = graph_us(lambda x=x, t=tile: logits(x, values, scales, t, SPARK_PROCESSORS), 2)
        rate = values.nbytes / time / 1000
        results[str(batch)] = {
            "us": round(time, 1),
            "gb_per_s": round(rate),
            "times_spark_bandwidth": round(rate / SPARK_GB_PER_S, 2),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiles", default=None, help="list of the table; default: this device's")
    arguments = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    own = f"{properties.major}.{properties.minor}"
    name = arguments.tiles or (own if own in read_table() else "default")
    from proofs.result_files import write_result
    from proofs.stages import environment

    document: dict[str, Any] = {
        "command": f"python3 proofs/kernels/lm_head.py --tiles {name}",
        "tiles": name,
        "hopper_matrix_instruction": not os.environ.get("DISABLE_MMA_V3"),
        "seed": 0,
        **environment(),
        "shapes": [],
    }
    for rows, inputs in SHAPES:
        shape = measure(rows, inputs, name)
        torch.cuda.empty_cache()
        shape["accuracy"]["student_t3"] = heavy_tailed(inputs, name)
        document["shapes"].append(shape)
    write_result(arguments.out, document)


if __name__ == "__main__":
    main()
