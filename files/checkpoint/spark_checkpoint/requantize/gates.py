"""What a quantised tree must be before its receipt: the original's own weights, rounded.

Names, types and shapes say nothing of a projection that took another's place, nor of a module that
was tuned to ruin. A weight rounded to 16 levels in groups of 128 differs from itself by about a
tenth (root mean square); another weight differs by more than itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from spark_contract.orders import RequantizePlan

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.numbers import Floats, floats
from spark_checkpoint.format.tree import CONFIG_NAME, Tree, read_config
from spark_checkpoint.storage import file_bytes, hash_file
from spark_checkpoint.verify.gates import WEIGHT

GROUP = 128
MODULE_LIMIT = 0.25
_COMPARED = 512  # packed modules that are compared, evenly spread over all there are
_PACK, _ZERO = 8, 8
_EXPERT = re.compile(r"^(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj$")
_FLOATS = frozenset({"BF16", "F16", "F32"})
_AGAIN = "look at the lines of AutoRound in the job's log"


class Compared(NamedTuple):
    """How many modules were compared with the original's weights, and how far off they are."""

    modules: int
    mean: float
    worst: float


def check_original(original: Tree) -> None:
    """Refuse a tree that is quantised already."""
    where = str(original.directory)
    if read_config(original.directory).get("quantization_config"):
        fix = "name the 16-bit repository in the model's sources.original"
        raise GateRefused(where, "is quantised already", fix)
    odd = {name for name in original.owner if original.tensor(name).dtype not in _FLOATS}
    if odd:
        what = f"holds {original.tensor(min(odd)).dtype} in {min(odd)}"
        raise GateRefused(where, what, "name the 16-bit repository in the model's sources.original")


def check_result(plan: RequantizePlan, original: Tree, result: Tree) -> dict[str, Any]:
    """Refuse a tree that is not the original's, rounded; return what was found, for people."""
    if result.duplicates:
        name = min(result.duplicates)
        raise GateRefused(str(result.directory), f"holds {name} in several files", _AGAIN)
    packed = sorted(name.removesuffix(".qweight") for name in result.owner
                    if name.endswith(".qweight"))  # fmt: skip
    _check_config(read_config(result.directory), f"{result.directory}/{CONFIG_NAME}")
    for module in packed:
        _check_form(module, original, result)
    kept = _check_kept(original, result)
    step = max(1, -(-len(packed) // _COMPARED))
    errors = {module: error_of(module, original, result) for module in packed[::step]}
    wrong = {module: error for module, error in errors.items() if not error <= MODULE_LIMIT}
    if wrong:
        module = max(wrong, key=lambda one: wrong[one])
        what = f"differs from the original's weight by {wrong[module]:.0%}; {len(wrong)} modules do"
        raise GateRefused(module, what, _AGAIN)
    found = Compared(len(errors), float(np.mean(list(errors.values()))), max(errors.values()))
    return {"packed_modules": len(packed), "kept_tensors": kept, "error": found._asdict()}


def _check_config(config: Mapping[str, Any], where: str) -> None:
    said = config.get("quantization_config")
    wanted = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True}
    if not isinstance(said, dict) or any(said.get(key) != value for key, value in wanted.items()):
        raise GateRefused(where, f"does not say {wanted} as its quantization_config", _AGAIN)


def _check_form(module: str, original: Tree, result: Tree) -> None:
    rows, columns = _shape(module, original)
    wanted = {
        "qweight": ({"I32"}, (columns // _PACK, rows)),
        "scales": ({"F16", "BF16"}, (columns // GROUP, rows)),
        "qzeros": ({"I32"}, (columns // GROUP, rows // _PACK)),
    }
    for suffix, (dtypes, shape) in wanted.items():
        tensor = result.tensor(f"{module}.{suffix}")
        if tensor.dtype not in dtypes or tensor.shape != shape:
            what = f"is {tensor.dtype} {list(tensor.shape)}, expected {list(shape)}"
            raise GateRefused(f"{module}.{suffix}", what, _AGAIN)


def _check_kept(original: Tree, result: Tree) -> int:
    """Refuse a tensor that was to stay as it is and did not; return how many did."""
    kept = [name for name in result.owner if name in original.owner]
    for name in kept:
        if not _same(name, original, result):
            raise GateRefused(name, "was to stay as it is and differs from the original", _AGAIN)
    return len(kept)


def _same(name: str, original: Tree, result: Tree) -> bool:
    before, after = original.tensor(name), result.tensor(name)
    if before.dtype != after.dtype:  # small ones alone: AutoRound writes a model in one type
        return np.array_equal(_values(original, name), _values(result, name))
    first, *rest = (
        hash_file(path, offset=offset, size_bytes=size_bytes)
        for path, offset, size_bytes in (original.span(name), result.span(name))
    )
    return before.shape == after.shape and [first] == rest


def error_of(module: str, original: Tree, result: Tree) -> float:
    """Return how far a packed weight is from the original's (root of squared error over power)."""
    weight = _weight(module, original)
    rounded = unpacked(result, module)
    power = float(np.square(weight, dtype=np.float64).sum())
    lost = float(np.square(rounded - weight, dtype=np.float64).sum())
    return (lost / power) ** 0.5 if power else float(lost > 0)


def unpacked(tree: Tree, module: str) -> Floats:
    """Return a packed weight as float32, outputs first."""
    codes = np.frombuffer(_raw(tree, f"{module}.qweight"), "<u4")
    codes = codes.reshape(tree.tensor(f"{module}.qweight").shape)
    nibbles = (codes[:, None, :] >> (4 * np.arange(_PACK, dtype=np.uint32))[None, :, None]) & 15
    levels = nibbles.reshape(-1, codes.shape[1]).astype(np.float32) - np.float32(_ZERO)
    weight: Floats = levels * np.repeat(_values(tree, f"{module}.scales"), GROUP, axis=0)
    return weight.T


def _shape(module: str, original: Tree) -> tuple[int, ...]:
    name = module + WEIGHT
    if name in original.owner:
        return original.tensor(name).shape
    fused, part, _ = _fused(module, original)
    _, rows, columns = original.tensor(fused).shape
    return (rows if part == "down" else rows // 2), columns


def _weight(module: str, original: Tree) -> Floats:
    """Return the weight of a module; newer repositories hold a layer's experts in one tensor."""
    name = module + WEIGHT
    if name in original.owner:
        return _values(original, name)
    fused, part, expert = _fused(module, original)
    experts, *shape = original.tensor(fused).shape
    path, offset, size_bytes = original.span(fused)
    each = size_bytes // experts
    raw = b"".join(bytes(one) for one in file_bytes(path, offset + expert * each, each))
    weight = floats(raw, original.tensor(fused).dtype, tuple(shape))
    if part == "down":
        return weight
    half = shape[0] // 2
    return weight[:half] if part == "gate" else weight[half:]


def _fused(module: str, original: Tree) -> tuple[str, str, int]:
    found = _EXPERT.match(module)
    if found:
        part = "down_proj" if found["part"] == "down" else "gate_up_proj"
        for name in (f"{found['layer']}.{part}", f"{found['layer']}.{part}.weight"):
            if name in original.owner and len(original.tensor(name).shape) == 3:
                return name, found["part"], int(found["expert"])
    fix = "name this model's own 16-bit repository in its sources.original"
    raise GateRefused(str(original.directory), f"holds no weight of {module}", fix)


def _values(tree: Tree, name: str) -> Floats:
    tensor = tree.tensor(name)
    return floats(_raw(tree, name), tensor.dtype, tensor.shape)


def _raw(tree: Tree, name: str) -> bytes:
    path, offset, size_bytes = tree.span(name)
    return b"".join(bytes(part) for part in file_bytes(path, offset, size_bytes))
