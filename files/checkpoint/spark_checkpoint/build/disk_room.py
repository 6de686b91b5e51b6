"""How many bytes a build will need at its peak, known before the first one is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from spark_contract.work.orders import BuildPlan

from spark_checkpoint.format.header import SIXTEEN_BIT, Tensor, tensor_bytes
from spark_checkpoint.format.int8 import GROUP, PACK
from spark_checkpoint.format.tree import Tree
from spark_checkpoint.verify.expected import HEAD, swapped
from spark_checkpoint.verify.gates import WEIGHT


def peak_bytes(
    plan: BuildPlan, base: Tree, received: Mapping[str, Tensor], grafted: Collection[str]
) -> int:
    """Return the most a build writes before it frees anything.

    ``received`` are donor tensors staged on disk, of which those ``grafted`` become 16-bit. What
    is received and what is made here is staged first and written into the result afterwards.
    """
    staged = sum(tensor.size_bytes for tensor in received.values())
    weights = [base.tensor(module + WEIGHT) for module in swapped(plan)]
    if plan.shared_experts == "fp8-self":
        staged += sum(_fp8_bytes(weight, plan.block_shape) for weight in weights)
    elif plan.shared_experts == "int8-g128":
        staged += sum(map(_int8_bytes, weights))
    if plan.head == "int8-g128":
        staged += _int8_bytes(base.tensor(HEAD))
    for name in grafted:
        entry = received[name]
        dtype = entry.dtype if entry.dtype in SIXTEEN_BIT else "BF16"
        staged += tensor_bytes(dtype, entry.shape)
    if plan.layout == "overlay":
        return 2 * staged
    whole = sum(header.data_start + header.data_bytes for header in base.shards.values())
    return 2 * staged + whole


def _int8_bytes(weight: Tensor) -> int:
    """Return the bytes of packed codes, scales and zero points of a weight."""
    outputs, inputs = weight.shape
    groups = inputs // GROUP
    return outputs * inputs + groups * outputs * 2 + groups * outputs // PACK * 4


def _fp8_bytes(weight: Tensor, block: tuple[int, int]) -> int:
    """Return the bytes of e4m3 codes and BF16 block scales of a weight."""
    rows, columns = weight.shape
    return rows * columns + -(-rows // block[0]) * -(-columns // block[1]) * 2
