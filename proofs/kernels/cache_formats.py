"""Time an attention layer of the 122B over each cache format, and compare with 16 bits.

    python3 proofs/kernels/cache_formats.py --out RESULT.json

A call runs several layers one after another, so that no cache stays in the L2 cache; times are per
layer, medians of CUDA-graph replays. One query is a step without drafts, three verify two drafts;
2,048 are a step of a prompt at the end of the context.
"""

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "files" / "image")]

from timing import graph_us, read_gb_per_s  # noqa: E402 # after the path above

from proofs.kernels.caches import UPSTREAM, Cache, make_cache  # noqa: E402

SHAPE = (32, 2, 256)
FLASHINFER = ("flashinfer",) if importlib.util.find_spec("flashinfer") else ()
KINDS = ("flash", *FLASHINFER, "auto", "turboquant_k8v4", *UPSTREAM)
CONTEXTS, REQUESTS, QUERIES = (16384, 65536, 131072), (1, 5), (1, 3)
PROMPT = 2048
IN_TURN_BYTES, MOST_LAYERS = 256 << 20, 12


def random_tokens(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    shape = (tokens, *SHAPE[1:])
    return torch.randn(shape, device="cuda").bfloat16(), torch.randn(
        shape, device="cuda"
    ).bfloat16()


def fill(kind: str, requests: int, context: int) -> list[Cache]:
    layers: list[Cache] = []
    while True:
        cache = make_cache(kind, SHAPE, requests, context)
        for request in range(requests):
            cache.write(request, *random_tokens(context, request))
        layers.append(cache)
        size = cache.store.numel() * cache.store.element_size()
        if len(layers) >= min(MOST_LAYERS, -(-IN_TURN_BYTES // size)):
            return layers


def exact(queries: Tensor, requests: int, context: int) -> Tensor:
    each = len(queries) // requests
    mask = torch.ones(each, context, dtype=torch.bool, device="cuda").tril(context - each)
    outputs = []
    for request in range(requests):
        keys, values = (
            tensor.float().transpose(0, 1).repeat_interleave(SHAPE[0] // SHAPE[1], 0)
            for tensor in random_tokens(context, request)
        )
        query = queries[request * each :][:each].float().transpose(0, 1)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask
        )
        outputs.append(attended.transpose(0, 1))
    return torch.cat(outputs)


def measure(kind: str, requests: int, context: int, wanted: dict[int, Tensor]) -> dict[str, Any]:
    layers = fill(kind, requests, context)
    numbers: dict[str, Any] = {"layers_in_turn": len(layers)}
    for each in QUERIES:
        queries = make_queries(requests * each)
        calls = [layer.attention(queries) for layer in layers]
        error = (calls[0]().float() - wanted[each]).norm() / wanted[each].norm()

        def run(calls: list[Any] = calls) -> None:
            for call in calls:
                call()

        us = graph_us(run, 2) / len(layers)
        numbers[f"queries_{each}"] = {"us": round(us, 1), "error": round(float(error), 4)}
    if requests == 1:
        call = layers[0].attention(make_queries(PROMPT))
        numbers[f"prompt_{PROMPT}"] = {"us": round(eager_us(call), 1)}
    return numbers


def eager_us(call: Callable[[], Tensor]) -> float:
    """Return the median time of a call that no graph can hold: prompts are computed eagerly."""
    times: list[float] = []
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times[1:])


def make_queries(count: int) -> Tensor:
    torch.manual_seed(count)
    return 4 * torch.randn(count, SHAPE[0], SHAPE[2], device="cuda").bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    from vllm.v1.worker import workspace

    from proofs.engine import quick
    from proofs.result_files import write_result
    from proofs.stages import environment

    workspace.init_workspace_manager(torch.device("cuda"))
    if quick.flash_attention() == 3:
        quick.read_turboquant_prompts_with_flash_attention_3()
    times: dict[str, Any] = {kind: {} for kind in KINDS}
    sizes: dict[str, int] = {}
    for context in CONTEXTS:
        for requests in REQUESTS:
            wanted = {
                each: exact(make_queries(requests * each), requests, context) for each in QUERIES
            }
            for kind in KINDS:
                at = f"{requests} x {context}"
                times[kind][at] = measure(kind, requests, context, wanted)
                print(kind, at, times[kind][at], flush=True)
                sizes.setdefault(kind, make_cache(kind, SHAPE, 1, 16).bytes_per_token())
                torch.cuda.empty_cache()
    document = {
        "command": "python3 proofs/kernels/cache_formats.py",
        "seed": 0,
        **environment(),
        "shape": dict(zip(("heads", "kv_heads", "head_size"), SHAPE, strict=True)),
        "read_gb_per_s": round(read_gb_per_s(1 << 32)),
        "bytes_per_token_and_layer": sizes,
        "us_per_layer": times,
        "rows": [],
    }
    write_result(arguments.out, document)


if __name__ == "__main__":
    main()
