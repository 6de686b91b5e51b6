"""Search block sizes of the LM-head kernel on this machine; the input of ``head/tiles.json``.

    python3 proofs/kernels/lm_head_sweep.py --out sweep.json [--inputs 3072] [--batches 1,16]

Times all candidates roughly, then the best again. ``DISABLE_MMA_V3=1`` avoids Hopper's matrix
instruction; ``--spark`` limits shared memory and programs to those of a Spark.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "files" / "image")]

from spark_vllm.head.choice import Tile  # noqa: E402 # after the path above
from spark_vllm.head.kernel import logits  # noqa: E402
from timing import graph_us, read_gb_per_s  # noqa: E402

ROWS = 248320
SHARED_LIMIT_BYTES = 200 * 1024
SPARK_SHARED_LIMIT_BYTES = 96 * 1024
SPARK_PROCESSORS = 48
WITHOUT_HOPPER = bool(os.environ.get("DISABLE_MMA_V3"))
KEPT_BATCH = 16
"""Logits of more rows would take too much of the cache."""


def candidates(batch: int, quick: bool, spark: bool) -> Iterator[Tile]:
    fitting = [size for size in (8, 16, 32, 64, 128) if size >= batch][: 2 if batch <= 8 else 1]
    shapes = [(64, 4), (128, 4), (128, 8), (256, 8), (64, 2), (32, 2), (32, 1)]
    hopper = not (spark or WITHOUT_HOPPER) and torch.cuda.get_device_capability() == (9, 0)
    for m, (n, warps), groups, split, stages, batch_first, bulk in itertools.product(
        fitting if batch < 128 else (64, 128, 256),
        shapes if batch <= 32 else shapes[:5],
        (1, 2) if batch <= 64 else (1,),
        (False, True) if batch <= 8 else (True,),
        (2, 3, 4),
        (False, True),
        (False, True) if hopper else (False,),
    ):
        x_bytes = m * 256
        limit = SPARK_SHARED_LIMIT_BYTES if spark else SHARED_LIMIT_BYTES
        if (n * 128 + x_bytes) * groups * stages > limit or (batch_first and m < 16):
            continue
        if 2 * n * m / (32 * warps) > 260:  # accumulators per thread
            continue
        several = not (quick or spark or hopper)
        for resident in (1,) if spark else (0, 2, 6) if several else (0,):
            yield Tile(
                None,
                m,
                n,
                groups,
                split,
                warps,
                stages,
                resident,
                batch_first,
                bulk_copies=bulk,
                early=hopper,
                keep_output=hopper and batch <= KEPT_BATCH,
            )


def prepare(in_features: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randint(-127, 128, (rows, in_features), dtype=torch.int8, device="cuda")
    scales = torch.rand((in_features // 128, rows), device="cuda").bfloat16()
    return weight, scales


def compile_candidate(job: tuple[Tile, int]) -> str | None:
    """Compile a candidate in a separate process; the result is the cache on disk."""
    tile, in_features = job
    try:
        weight, scales = prepare(in_features, 256)
        x = torch.randn(3, in_features, device="cuda", dtype=torch.bfloat16)
        logits(x, weight, scales, tile, 1)
        torch.cuda.synchronize()
    except Exception as error:  # a candidate may exceed any limit of the device
        return f"{tile}: {str(error)[:120]}"
    return None


def sweep(in_features: int, batches: list[int], spark: bool) -> dict[str, object]:
    todo = {
        (dataclasses.replace(tile, programs_per_processor=0), in_features)
        for batch in batches
        for tile in candidates(batch, quick=True, spark=spark)
    }
    context = multiprocessing.get_context("spawn")
    jobs = max(1, (os.cpu_count() or 2) - 2)
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        failed = [error for error in pool.map(compile_candidate, todo, chunksize=4) if error]
    bad = {error.split(": ")[0] for error in failed}
    weight, scales = prepare(in_features, ROWS)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    processors = SPARK_PROCESSORS if spark else processors
    best = {}
    for batch in batches:
        x = torch.randn(batch, in_features, device="cuda", dtype=torch.bfloat16)
        rough = []
        for tile in candidates(batch, quick=False, spark=spark):
            if str(dataclasses.replace(tile, programs_per_processor=0)) in bad:
                continue
            time = graph_us(lambda t=tile, x=x: logits(x, weight, scales, t, processors), 2, 2)
            rough.append((time, tile))
        rough.sort(key=lambda pair: pair[0])
        fine = [
            (graph_us(lambda t=t, x=x: logits(x, weight, scales, t, processors)), t)
            for _, t in rough[:24]
        ]
        fine.sort(key=lambda pair: pair[0])
        best[batch] = [
            {"us": round(time, 2), **dataclasses.asdict(tile)} for time, tile in fine[:12]
        ]
        print(in_features, batch, len(rough), best[batch][:3], flush=True)
    return {"inputs": in_features, "rows": ROWS, "failed": failed, "best": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--inputs", default="3072")
    parser.add_argument("--batches", default="1,8,16,32,64,128,256,512")
    parser.add_argument("--spark", action="store_true")
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    from proofs.result_files import write_result
    from proofs.stages import environment

    result = {
        "command": ("DISABLE_MMA_V3=1 " if WITHOUT_HOPPER else "")
        + "python3 proofs/kernels/lm_head_sweep.py"
        f" --batches {arguments.batches} --inputs {arguments.inputs}"
        + (" --spark" if arguments.spark else ""),
        **environment(),
        "limited_to_programs": SPARK_PROCESSORS if arguments.spark else None,
        "hopper_matrix_instruction": not WITHOUT_HOPPER,
        "read_gb_per_s": {str(size): round(read_gb_per_s(size)) for size in (762839040, 1 << 32)},
        "sweeps": [
            sweep(int(size), batches, arguments.spark) for size in arguments.inputs.split(",")
        ],
    }
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
