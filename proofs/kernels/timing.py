# ruff: noqa: N803
"""Time GPU work by replaying CUDA graphs, and measure memory bandwidth."""

import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl


def graph_us(
    work: Callable[[], object], launches: int = 8, replays: int = 9, *, new_outputs: bool = False
) -> float:
    """Return the median time of a call of ``work`` in microseconds, ``launches`` per graph.

    With ``new_outputs`` each call writes to new memory, as in a first step.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    outputs = []
    with torch.cuda.graph(graph):
        for _ in range(launches):
            output = work()
            if new_outputs:
                outputs.append(output)
            del output
    times = []
    for _ in range(replays + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / launches)
    del graph
    return statistics.median(times[1:])


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _read_kernel(source, out, count, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        total ^= tl.load(source + start + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(out + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


def read_gb_per_s(size_bytes: int, programs_per_processor: tuple[int, ...] = (2, 4, 8)) -> float:
    source = torch.randint(
        -(2**31), 2**31 - 1, (size_bytes // 4,), dtype=torch.int32, device="cuda"
    )
    floats = source.view(torch.bfloat16)
    block, processors = 2048, torch.cuda.get_device_properties(0).multi_processor_count
    times = [graph_us(lambda: floats.sum(), 4)]
    for per_processor in programs_per_processor:
        programs = per_processor * processors
        out = torch.empty(programs * block, dtype=torch.int32, device="cuda")
        times.append(
            graph_us(
                lambda grid=(programs,), out=out: _read_kernel[grid](
                    source, out, source.numel(), BLOCK=block, num_warps=8, num_stages=4
                ),
                4,
            )
        )
    return size_bytes / min(times) / 1000
