# ruff: noqa: N803
"""Triton kernels of the INT8 LM head: logits of a small batch from INT8 rows, read once.

The head is the largest read of a decode step, so memory traffic decides. Weights become BF16 in
registers; or, if that costs more than reading them, activations are split into two INT8 halves of a
16-bit number per group, so that products are exact integers. The kernels run on 8.0 and later.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from spark_vllm.head.choice import GROUP_SIZE, Tile

LARGEST_HALF_SUM = 32512
"""Largest 16-bit activation: 127 * 256, so that the upper half fits in INT8 after rounding."""


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _expand(values, FIRST: tl.constexpr):
    return values[:, None] if FIRST else values[None, :]


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _dot(weight, x, acc, BATCH_FIRST: tl.constexpr, EXACT: tl.constexpr):
    # The conditions are constant, so only one branch is compiled.
    if EXACT:
        if BATCH_FIRST:
            product = tl.dot(x, weight, acc=acc, out_dtype=tl.int32)
        else:
            product = tl.dot(weight, x, acc=acc, out_dtype=tl.int32)
    else:
        product = tl.dot(x, weight) if BATCH_FIRST else tl.dot(weight, x)
    return product


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _load_weight(source, row, safe_row, width, column, GROUP: tl.constexpr, BULK: tl.constexpr):
    if BULK:  # ``source`` is a descriptor; it returns zeros for rows past the end
        weight = source.load([row, column])
    else:
        address = source + safe_row.to(tl.int64)[:, None] * width + tl.arange(0, GROUP)[None, :]
        weight = tl.load(address + column, eviction_policy="evict_first")
    return weight


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _store(target, values, mask, KEEP: tl.constexpr):
    if KEEP:
        tl.store(target, values, mask=mask, eviction_policy="evict_last")
    else:
        tl.store(target, values, mask=mask)


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _wait_for_earlier_kernels(EARLY: tl.constexpr):
    if EARLY:  # earlier kernels may still write our inputs or read our outputs
        tl.extra.cuda.gdc_wait()


# A different batch or number of groups must not compile the kernel again.
@triton.jit(do_not_specialize=["batch", "groups"])  # type: ignore[untyped-decorator] # no types
def _logits_kernel(
    x_ptr,  # BF16 or FP16 [batch, in]; SPLIT: int8 [2, batch, groups * GROUP]
    x_scale_ptr,  # SPLIT: float32 [groups, batch]; otherwise unused
    weight_ptr,  # int8 [rows, groups * GROUP]; BULK: a descriptor of this tensor
    scale_ptr,  # BF16 [groups, rows]
    out_ptr,  # BF16 or FP16 [batch, rows]
    batch,
    rows,
    in_features,
    groups,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_PER_STEP: tl.constexpr,
    SPLIT: tl.constexpr,
    BATCH_FIRST: tl.constexpr,  # batch is the first operand, so Hopper uses the plain ``mma``
    EVEN_K: tl.constexpr,
    BULK: tl.constexpr,
    EARLY: tl.constexpr,
    KEEP: tl.constexpr,
):
    _wait_for_earlier_kernels(EARLY)
    tiles_m = tl.cdiv(batch, BLOCK_M)
    tiles = tl.cdiv(rows, BLOCK_N) * tiles_m
    inner = tl.arange(0, GROUP)
    x_width = groups * GROUP if SPLIT else in_features
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        # Batch tiles of the same rows are adjacent, so that the second reads the rows from L2.
        first_row = (tile // tiles_m) * BLOCK_N
        row = first_row + tl.arange(0, BLOCK_N)
        item = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
        # Rows past the end read the last row again, so that copies of the weight need no predicate.
        safe_row = tl.minimum(row, rows - 1)
        x_item = x_ptr + _expand(item, BATCH_FIRST) * x_width + _expand(inner, not BATCH_FIRST)
        mask = _expand(item, BATCH_FIRST) < batch
        if BATCH_FIRST:
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        else:
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        # Load one group ahead, because Triton does not pipeline small loads.
        scale = tl.load(scale_ptr + safe_row)
        if SPLIT:
            x_scale = tl.load(x_scale_ptr + item, mask=item < batch, other=0.0)
        for first in range(0, groups, GROUPS_PER_STEP):
            for offset in tl.static_range(GROUPS_PER_STEP):
                group = first + offset
                next_group = tl.minimum(group + 1, groups - 1)
                next_scale = tl.load(scale_ptr + next_group * rows + safe_row)
                weight = _load_weight(
                    weight_ptr, first_row, safe_row, groups * GROUP, group * GROUP, GROUP, BULK
                )
                if BATCH_FIRST:
                    weight = tl.trans(weight)
                if SPLIT:
                    next_x_scale = tl.load(
                        x_scale_ptr + next_group * batch + item, mask=item < batch, other=0.0
                    )
                    upper = tl.load(x_item + group * GROUP, mask=mask, other=0)
                    lower = tl.load(x_item + (group * GROUP + batch * x_width), mask=mask, other=0)
                    # Exact: 128 products of 8 by 16 bits stay below 2 ** 31.
                    exact = _dot(weight, upper, None, BATCH_FIRST, EXACT=True) * 256
                    exact = _dot(weight, lower, exact, BATCH_FIRST, EXACT=True)
                    product = exact.to(tl.float32) * _expand(x_scale, BATCH_FIRST)
                    x_scale = next_x_scale
                else:
                    inside = mask
                    if not EVEN_K:
                        column = group * GROUP + _expand(inner, not BATCH_FIRST)
                        inside = mask & (column < in_features)
                    x = tl.load(x_item + group * GROUP, mask=inside, other=0.0)
                    product = _dot(weight.to(x.dtype), x, None, BATCH_FIRST, EXACT=False)
                total += product * _expand(scale.to(tl.float32), not BATCH_FIRST)
                scale = next_scale
        target = out_ptr + _expand(item, BATCH_FIRST).to(tl.int64) * rows
        target += _expand(row, not BATCH_FIRST)
        stored = mask & (_expand(row, not BATCH_FIRST) < rows)
        _store(target, total.to(out_ptr.dtype.element_ty), stored, KEEP)


@triton.jit(do_not_specialize=["batch", "groups"])  # type: ignore[untyped-decorator] # no types
def _split_kernel(
    x_ptr,
    halves_ptr,
    x_scale_ptr,
    batch,
    in_features,
    groups,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    EARLY: tl.constexpr,
):
    _wait_for_earlier_kernels(EARLY)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    item, group = tl.program_id(0), tl.program_id(1)
    inner = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(x_ptr + item * in_features + inner, mask=inner < in_features, other=0.0)
    x = x.to(tl.float32)
    # max drops NaN, and NaN becomes an arbitrary integer; the sum makes the scale NaN, also for
    # infinity, so that damaged activations give NaN logits.
    scale = tl.max(tl.abs(x), axis=0) / LARGEST + tl.sum(x * 0.0, axis=0)
    # Rounds half up.
    whole = tl.floor(x / tl.where(scale == 0.0, 1.0, scale) + 0.5).to(tl.int32)
    upper = (whole + 128) >> 8
    target = halves_ptr + item * (groups * GROUP) + inner
    tl.store(target, upper.to(tl.int8))
    tl.store(target + batch * (groups * GROUP), (whole - upper * 256).to(tl.int8))
    tl.store(x_scale_ptr + group * batch + item, scale)


def logits(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, tile: Tile, processors: int
) -> torch.Tensor:
    """Return ``x @ dequantized.T`` in the dtype of ``x``.

    Launches at most two kernels. A CUDA graph can capture the call once the tile has run.

    Args:
        x: BF16 or FP16 ``[batch, in]``.
        weight: int8 ``[rows, in rounded up to GROUP_SIZE]``, contiguous.
        scales: BF16 ``[groups, rows]``, contiguous.
        tile: any entry of the table.
        processors: multiprocessors of the device.
    """
    x = x.contiguous()
    if x.data_ptr() % 16:  # a different alignment would compile again, during a request
        x = x.clone()
    batch, in_features = x.shape
    groups, rows = scales.shape
    out = torch.empty((batch, rows), dtype=x.dtype, device=x.device)
    launch = {"launch_pdl": True} if tile.early else {}
    x_scale = scales  # a pointer the kernel does not read
    if tile.split:
        halves = torch.empty((2, batch, weight.shape[1]), dtype=torch.int8, device=x.device)
        x_scale = torch.empty((groups, batch), dtype=torch.float32, device=x.device)
        _split_kernel[(batch, groups)](
            x,
            halves,
            x_scale,
            batch,
            in_features,
            groups,
            GROUP_SIZE,
            LARGEST_HALF_SUM,
            tile.early,
            num_warps=1,
            **launch,
        )
        x = halves
    if tile.bulk_copies:
        weight = TensorDescriptor.from_tensor(weight, [tile.block_n, GROUP_SIZE])
    tiles = triton.cdiv(rows, tile.block_n) * triton.cdiv(batch, tile.block_m)
    programs = min(tiles, tile.programs_per_processor * processors or tiles)
    _logits_kernel[(programs,)](
        x,
        x_scale,
        weight,
        scales,
        out,
        batch,
        rows,
        in_features,
        groups,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        GROUP=GROUP_SIZE,
        GROUPS_PER_STEP=tile.groups_per_step if groups % tile.groups_per_step == 0 else 1,
        SPLIT=tile.split,
        BATCH_FIRST=tile.batch_first,
        EVEN_K=in_features == groups * GROUP_SIZE,
        BULK=tile.bulk_copies,
        EARLY=tile.early,
        KEEP=tile.keep_output,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **launch,
    )
    return out
