"""What AutoRound packs and what it leaves, told by names and headers before it works for hours.

The layers of the language model are tuned. The drafter's are never loaded; when the rest is made
they are rounded to nearest, in the same packing, by AutoRound's `copy_missing_tensors_from_source`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from spark_contract.work.orders import RequantizePlan
from spark_contract.work.patterns import expand

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.tree import Tree
from spark_checkpoint.requantize.fused import part_of
from spark_checkpoint.requantize.gates import GROUP
from spark_checkpoint.verify.gates import WEIGHT

_PACKED = ".qweight"
_LAYERS = re.compile(r"(model\.language_model|mtp)\.layers\.\d+\.")
_GATES = (".gate", ".shared_expert_gate")
_MULTIPLE = 32


def check_packable(plan: RequantizePlan, original: Tree) -> None:
    """Refuse a plan that asks for a packed module which AutoRound would leave as it is."""
    for module in packed_modules(plan):
        reason = left_by_name(module) or _left_by_shape(module, original)
        if reason:
            what = f"is to be packed, and AutoRound leaves it in 16 bits: {reason}"
            raise GateRefused(module, what, f"name {module}{WEIGHT} in the model's tensors instead")


def packed_modules(plan: RequantizePlan) -> Iterator[str]:
    """Yield the modules that a plan wants packed."""
    for pattern in (*plan.base_tensors, *plan.mtp_tensors):
        for name in expand(pattern):
            if name.endswith(_PACKED):
                yield name.removesuffix(_PACKED)


def left_by_name(module: str) -> str:
    """Return why AutoRound leaves a module of this name alone; nothing where it does not."""
    if not _LAYERS.match(module):
        return "it is in no layer of the language model or of its drafter"
    return "it is a gate" if module.endswith(_GATES) else ""


def _left_by_shape(module: str, original: Tree) -> str:
    shape = _shape(module, original)
    if shape is None:
        return "the original holds no such weight"
    if len(shape) != 2:
        return f"it is no matrix but {list(shape)}"
    rows, columns = shape
    if rows % _MULTIPLE:
        return f"its {rows} rows are no multiple of {_MULTIPLE}"
    return f"its {columns} columns are no multiple of {GROUP}" if columns % GROUP else ""


def _shape(module: str, original: Tree) -> tuple[int, ...] | None:
    """Return a weight's shape, that of an expert also from the one tensor of its layer."""
    if module + WEIGHT in original.owner:
        return original.tensor(module + WEIGHT).shape
    part = part_of(module, original)
    return part.shape if part else None
