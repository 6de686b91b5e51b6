"""Check that a quantised checkpoint is the original's weights, rounded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from spark_contract.orders import RequantizePlan

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.directory import CONFIG_NAME, Checkpoint, Span, read_config, read_span
from spark_checkpoint.format.numbers import Floats, floats
from spark_checkpoint.storage import hash_file
from spark_checkpoint.tensor_sets import WEIGHT

GROUP = 128
# Rounding to 16 levels in groups of 128 changes a weight by about a tenth (root mean square);
# another weight differs by more than its own size.
MODULE_LIMIT = 0.25
_COMPARED = 512  # packed modules compared, evenly spread
_PACK, _ZERO = 8, 8
_EXPERT = re.compile(r"^(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj$")
_FLOATS = frozenset({"BF16", "F16", "F32"})
_ORIGINAL_FIX = "name the 16-bit repository in the model's sources.original"
_FIX = "read AutoRound's lines in the job's log"


class Matrix(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    span: Span


def find_weight(module: str, original: Checkpoint) -> Matrix | None:
    """Return a module's weight in the original; an expert's may be a slice of a fused tensor.

    Newer repositories hold all experts of a layer in one tensor; gate rows precede up rows.
    """
    name = module + WEIGHT
    if name in original.owner:
        tensor = original.tensor(name)
        return Matrix(tensor.dtype, tensor.shape, original.span(name))
    return find_fused_expert(module, original)


def find_fused_expert(module: str, original: Checkpoint) -> Matrix | None:
    """Return an expert's slice of its layer's fused tensor; None if there is no such slice."""
    match = _EXPERT.match(module)
    if not match:
        return None
    fused = f"{match['layer']}.{'down_proj' if match['part'] == 'down' else 'gate_up_proj'}"
    name = next((name for name in (fused, fused + WEIGHT) if name in original.owner), None)
    if name is None or len(original.tensor(name).shape) != 3:
        return None
    dtype, (experts, rows, columns) = original.tensor(name).dtype, original.tensor(name).shape
    if int(match["expert"]) >= experts:
        return None
    path, offset, size_bytes = original.span(name)
    size_bytes //= experts
    offset += int(match["expert"]) * size_bytes
    if match["part"] != "down":
        rows, size_bytes = rows // 2, size_bytes // 2
        offset += size_bytes if match["part"] == "up" else 0
    return Matrix(dtype, (rows, columns), Span(path, offset, size_bytes))


def check_original(original: Checkpoint) -> None:
    where = str(original.directory)
    if read_config(original.directory).get("quantization_config"):
        raise GateRefused(where, "is quantised already", _ORIGINAL_FIX)
    odd = {name for name in original.owner if original.tensor(name).dtype not in _FLOATS}
    if odd:
        what = f"holds {original.tensor(min(odd)).dtype} in {min(odd)}"
        raise GateRefused(where, what, _ORIGINAL_FIX)


def check_result(plan: RequantizePlan, original: Checkpoint, result: Checkpoint) -> dict[str, Any]:
    """Refuse a checkpoint that is not the original, rounded; return figures for the receipt."""
    if result.duplicates:
        name = min(result.duplicates)
        raise GateRefused(str(result.directory), f"holds {name} in several files", _FIX)
    packed = sorted(name.removesuffix(".qweight") for name in result.owner
                    if name.endswith(".qweight"))  # fmt: skip
    _check_config(read_config(result.directory), f"{result.directory}/{CONFIG_NAME}")
    for module in packed:
        _check_packed_shapes(module, original, result)
    kept = _check_kept(original, result)
    step = max(1, -(-len(packed) // _COMPARED))
    errors = {module: relative_error(module, original, result) for module in packed[::step]}
    wrong = {module: error for module, error in errors.items() if not error <= MODULE_LIMIT}
    if wrong:
        module = max(wrong, key=lambda module: wrong[module])
        what = f"differs from the original's weight by {wrong[module]:.0%}; {len(wrong)} modules do"
        raise GateRefused(module, what, _FIX)
    mean = float(np.mean(list(errors.values())))
    error = {"modules": len(errors), "mean": mean, "worst": max(errors.values())}
    kept += check_kept_experts(original, result)
    return {"packed_modules": len(packed), "kept_tensors": kept, "error": error}


def _check_config(config: Mapping[str, Any], where: str) -> None:
    actual = config.get("quantization_config")
    expected = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True}
    if not isinstance(actual, dict) or any(actual.get(k) != v for k, v in expected.items()):
        raise GateRefused(where, f"lacks {expected} in quantization_config", _FIX)


def _check_packed_shapes(module: str, original: Checkpoint, result: Checkpoint) -> None:
    rows, columns = _weight_of(module, original).shape
    expected = {
        "qweight": ({"I32"}, (columns // _PACK, rows)),
        "scales": ({"F16", "BF16"}, (columns // GROUP, rows)),
        "qzeros": ({"I32"}, (columns // GROUP, rows // _PACK)),
    }
    for suffix, (dtypes, shape) in expected.items():
        tensor = result.tensor(f"{module}.{suffix}")
        if tensor.dtype not in dtypes or tensor.shape != shape:
            what = f"is {tensor.dtype} {list(tensor.shape)}, expected {list(shape)}"
            raise GateRefused(f"{module}.{suffix}", what, _FIX)


def _check_kept(original: Checkpoint, result: Checkpoint) -> int:
    """Refuse a changed tensor that should be kept; return how many are kept."""
    kept = [name for name in result.owner if name in original.owner]
    for name in kept:
        if not _is_same(name, original, result):
            raise GateRefused(name, "should be kept and differs from the original", _FIX)
    return len(kept)


def check_kept_experts(original: Checkpoint, result: Checkpoint) -> int:
    """Refuse a changed 16-bit expert that the result splits from a fused tensor; count them."""
    count = 0
    for name in sorted(result.owner.keys() - original.owner.keys()):
        if not name.endswith(WEIGHT):
            continue
        expert = find_fused_expert(name.removesuffix(WEIGHT), original)
        if expert is None:
            continue
        count += 1
        same = _hash(expert.span) == _hash(result.span(name))
        if not same or expert.shape != result.tensor(name).shape:
            raise GateRefused(name, "should be kept and differs from the original", _FIX)
    return count


def _is_same(name: str, original: Checkpoint, result: Checkpoint) -> bool:
    before, after = original.tensor(name), result.tensor(name)
    if before.dtype != after.dtype:  # only small tensors: AutoRound writes a model in one dtype
        return np.array_equal(_read_floats(original, name), _read_floats(result, name))
    same_shape = before.shape == after.shape
    return same_shape and _hash(original.span(name)) == _hash(result.span(name))


def relative_error(module: str, original: Checkpoint, result: Checkpoint) -> float:
    """Return a packed weight's error: root of squared error over squared weight."""
    matrix = _weight_of(module, original)
    weight = floats(read_span(matrix.span), matrix.dtype, matrix.shape)
    rounded = unpacked(result, module)
    power = float(np.square(weight, dtype=np.float64).sum())
    lost = float(np.square(rounded - weight, dtype=np.float64).sum())
    return (lost / power) ** 0.5 if power else float(lost > 0)


def unpacked(checkpoint: Checkpoint, module: str) -> Floats:
    """Return a packed weight as float32 ``[out, in]``."""
    name = f"{module}.qweight"
    codes = np.frombuffer(read_span(checkpoint.span(name)), "<u4")
    codes = codes.reshape(checkpoint.tensor(name).shape)
    nibbles = (codes[:, None, :] >> (4 * np.arange(_PACK, dtype=np.uint32))[None, :, None]) & 15
    levels = nibbles.reshape(-1, codes.shape[1]).astype(np.float32) - np.float32(_ZERO)
    scales = np.repeat(_read_floats(checkpoint, f"{module}.scales"), GROUP, axis=0)
    weight: Floats = levels * scales
    return weight.T


def _weight_of(module: str, original: Checkpoint) -> Matrix:
    matrix = find_weight(module, original)
    if matrix is None:
        fix = "name this model's own 16-bit repository in its sources.original"
        raise GateRefused(str(original.directory), f"holds no weight of {module}", fix)
    return matrix


def _read_floats(checkpoint: Checkpoint, name: str) -> Floats:
    tensor = checkpoint.tensor(name)
    return floats(read_span(checkpoint.span(name)), tensor.dtype, tensor.shape)


def _hash(span: Span) -> str:
    return hash_file(span.path, offset=span.offset, size_bytes=span.size_bytes)
