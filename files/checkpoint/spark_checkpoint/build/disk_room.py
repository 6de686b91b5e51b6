"""How many bytes a build will need at its peak, known before the first one is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from spark_checkpoint.format.header import Tensor, tensor_bytes
from spark_checkpoint.format.int8 import GROUP, PACK
from spark_checkpoint.format.numbers import SIXTEEN_BIT
from spark_checkpoint.format.tree import Tree


def int8_bytes(weight: Tensor) -> int:
    """Return the bytes of packed codes, scales and zero points of a weight."""
    outputs, inputs = weight.shape
    groups = inputs // GROUP
    return outputs * inputs + groups * outputs * 2 + groups * outputs // PACK * 4


def fp8_bytes(weight: Tensor, block: tuple[int, int]) -> int:
    """Return the bytes of e4m3 codes and BF16 block scales of a weight."""
    rows, columns = weight.shape
    return rows * columns + -(-rows // block[0]) * -(-columns // block[1]) * 2


def grafted_bytes(entries: Iterable[Tensor]) -> int:
    """Return the bytes of donor tensors once they are 16-bit."""
    return sum(
        tensor_bytes(entry.dtype if entry.dtype in SIXTEEN_BIT else "BF16", entry.shape)
        for entry in entries
    )


def peak_bytes(
    base: Tree,
    *,
    layout: str,
    received: Mapping[str, Tensor],
    made_bytes: int,
) -> int:
    """Return the most a build writes before it frees anything.

    ``received`` are donor tensors staged on disk, ``made_bytes`` what is computed here. Both
    are staged first and written into the result afterwards.
    """
    staged = sum(tensor.size_bytes for tensor in received.values()) + made_bytes
    if layout == "overlay":
        return 2 * staged
    whole = sum(header.data_start + header.data_bytes for header in base.shards.values())
    return 2 * staged + whole
