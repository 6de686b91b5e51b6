"""Quantize an LM head, compute it with our kernel, with Marlin or in BF16, and measure times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from spark_vllm.head.choice import GROUP_SIZE, KERNELS, read_table, tile_for, tiles_for

ROWS_PER_BLOCK = 8192
LARGEST = 127

Head = Callable[[torch.Tensor], torch.Tensor]

_LAUNCHES = 4
_REPLAYS = 9


def quantize_rows(
    weight: torch.Tensor, rows_per_block: int = ROWS_PER_BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight ``[rows, in]`` of any float dtype, ``rows_per_block`` rows at a time.

    Return int8 ``[rows, in rounded up to 128]``, padded with zeros, and BF16 scales
    ``[groups, rows]``. Values use the scale *as stored*, so rounding the scale adds no error.
    """
    rows, in_features = weight.shape
    groups = -(-in_features // GROUP_SIZE)
    device = weight.device
    values = torch.zeros((rows, groups * GROUP_SIZE), dtype=torch.int8, device=device)
    scales = torch.empty((groups, rows), dtype=torch.bfloat16, device=device)
    for start in range(0, rows, rows_per_block):
        block = slice(start, min(start + rows_per_block, rows))
        source = torch.nn.functional.pad(
            weight[block].float(), (0, groups * GROUP_SIZE - in_features)
        ).view(-1, groups, GROUP_SIZE)
        scale = (source.abs().amax(-1) / LARGEST).to(torch.bfloat16)
        scales[:, block] = scale.t()
        divisor = torch.where(scale == 0, 1, scale).float().unsqueeze(-1)
        rounded = (source / divisor).round_().clamp_(-LARGEST, LARGEST)
        values[block] = rounded.to(torch.int8).view(-1, groups * GROUP_SIZE)
    return values, scales


def dequantize_rows(values: torch.Tensor, scales: torch.Tensor, in_features: int) -> torch.Tensor:
    """Return the float32 weight ``[rows, in_features]`` that the kernel uses."""
    groups, rows = scales.shape
    wide = values.float().view(rows, groups, GROUP_SIZE) * scales.t().float().unsqueeze(-1)
    return wide.view(rows, -1)[:, :in_features]


def make_own_head(values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor) -> Head:
    """Return a head that runs our kernel on INT8 rows, after compiling every tile."""
    # Imported here, because Triton may be missing on machines without a GPU.
    from spark_vllm.head.kernel import logits

    properties = torch.cuda.get_device_properties(values.device)
    tiles = tuple(tiles_for((properties.major, properties.minor), read_table()))
    processors = int(properties.multi_processor_count)
    row = torch.zeros((1, weight.shape[1]), dtype=weight.dtype, device=values.device)
    for tile in tiles:
        logits(row, values, scales, tile, processors)
    torch.cuda.synchronize(values.device)
    return lambda x: logits(x, values, scales, tile_for(x.shape[0], tiles), processors)


def make_marlin_head(values: torch.Tensor, scales: torch.Tensor) -> Head:
    """Return a head that runs the engine's Marlin W8A16 kernel on repacked INT8 rows."""
    from vllm._custom_ops import gptq_marlin_repack
    from vllm.model_executor.layers.quantization.utils.marlin_utils import (
        apply_gptq_marlin_linear,
        marlin_make_empty,
        marlin_make_workspace_new,
        marlin_permute_scales,
    )
    from vllm.scalar_type import scalar_types

    rows, in_features = values.shape
    packed = pack_gptq(values)
    repacked = gptq_marlin_repack(packed, size_k=in_features, size_n=rows, num_bits=8)
    del packed
    ordered = marlin_permute_scales(
        scales.contiguous(), size_k=in_features, size_n=rows, group_size=GROUP_SIZE
    )
    empty = marlin_make_empty(values.device)
    workspace = marlin_make_workspace_new(values.device)
    return lambda x: apply_gptq_marlin_linear(
        input=x,
        weight=repacked,
        weight_scale=ordered,
        weight_zp=empty,
        workspace=workspace,
        wtype=scalar_types.uint8b128,
        output_size_per_partition=rows,
        input_size_per_partition=in_features,
    )


def make_head(
    kernel: str, values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor
) -> Head:
    if kernel == "bf16":
        return lambda x: x @ weight.t()
    if kernel == "own":
        return make_own_head(values, scales, weight)
    return make_marlin_head(values, scales)


def pack_gptq(values: torch.Tensor) -> torch.Tensor:
    """Pack INT8 rows as GPTQ does: int32 ``[in / 4, rows]``, first input in the lowest byte."""
    rows, in_features = values.shape
    packed = torch.zeros((in_features // 4, rows), dtype=torch.int32, device=values.device)
    for byte in range(4):
        packed |= (values[:, byte::4].t().int() + 128) << (8 * byte)
    return packed


def time_us(head: Head, x: torch.Tensor) -> float:
    """Return the median time of one launch when a CUDA graph of launches is replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        head(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            head(x)
    times = []
    for _ in range(_REPLAYS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / _LAUNCHES)
    return round(float(statistics.median(times[1:])), 2)


def measure_kernels(
    weight: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, batches: Sequence[int]
) -> dict[str, dict[int, float]]:
    heads = {kernel: make_head(kernel, values, scales, weight) for kernel in KERNELS}
    inputs = {
        batch: torch.randn(batch, weight.shape[1], dtype=weight.dtype, device=weight.device)
        for batch in batches
    }
    return {
        name: {batch: time_us(head, x) for batch, x in inputs.items()}
        for name, head in heads.items()
    }
