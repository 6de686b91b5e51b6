"""Check that AutoRound can pack the modules of a plan, and compare result and original."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from spark_contract.builder_api import RequantizePlan, expand

from spark_checkpoint import number_formats
from spark_checkpoint.directory import CONFIG_NAME, Checkpoint, Span, read_config, read_span
from spark_checkpoint.errors import ValidationError
from spark_checkpoint.headers import SIXTEEN_BIT
from spark_checkpoint.number_formats import GROUP, INT4_LIMIT, Floats, to_floats
from spark_checkpoint.storage import hash_file
from spark_checkpoint.tensor_sets import WEIGHT

QWEIGHT = ".qweight"
_MAX_COMPARED = 512  # number of packed modules to compare, evenly spaced
_EXPERT = re.compile(r"^(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj$")
_FLOAT_DTYPES = frozenset({"BF16", "F16", "F32"})
_ORIGINAL_FIX = "set sources.original of the model to the 16-bit repository"
_FIX = "read AutoRound's messages in the job's log"
# AutoRound tunes these layers in the language model, but only rounds them in the drafter.
_LAYERS = re.compile(r"(model\.language_model|mtp)\.layers\.\d+\.")
_GATES = (".gate", ".shared_expert_gate")
_ROWS_MULTIPLE = 32


class Matrix(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    span: Span


def find_weight(module: str, original: Checkpoint) -> Matrix | None:
    name = module + WEIGHT
    if name in original.owner:
        tensor = original.tensor(name)
        return Matrix(tensor.dtype, tensor.shape, original.span(name))
    return find_fused_expert(module, original)


def find_fused_expert(module: str, original: Checkpoint) -> Matrix | None:
    """Return an expert's slice of a fused tensor (gate rows, then up rows), or None."""
    match = _EXPERT.match(module)
    if not match:
        return None
    projection = "down_proj" if match["part"] == "down" else "gate_up_proj"
    name = f"{match['layer']}.{projection}"
    if name not in original.owner:
        name += WEIGHT
    if name not in original.owner or len(original.tensor(name).shape) != 3:
        return None
    tensor, expert = original.tensor(name), int(match["expert"])
    experts, rows, columns = tensor.shape
    if expert >= experts:
        return None
    path, offset, size_bytes = original.span(name)
    size_bytes //= experts
    offset += expert * size_bytes
    if projection == "gate_up_proj":
        rows, size_bytes = rows // 2, size_bytes // 2
        if match["part"] == "up":
            offset += size_bytes
    return Matrix(tensor.dtype, (rows, columns), Span(path, offset, size_bytes))


def check_packable(plan: RequantizePlan, original: Checkpoint) -> None:
    for module in packed_modules(plan):
        reason = skip_reason(module) or _unpackable_reason(find_weight(module, original))
        if reason:
            problem = f"must be packed, but AutoRound would skip it: {reason}"
            fix = f"list {module}{WEIGHT} under `tensors` in the model file instead"
            raise ValidationError(module, problem, fix)


def packed_modules(plan: RequantizePlan) -> Iterator[str]:
    for pattern in (*plan.base_tensors, *plan.mtp_tensors):
        for name in expand(pattern):
            if name.endswith(QWEIGHT):
                yield name.removesuffix(QWEIGHT)


def skip_reason(module: str) -> str:
    if not _LAYERS.match(module):
        return "it is in no layer of the language model or the drafter"
    return "it is a gate" if module.endswith(_GATES) else ""


def _unpackable_reason(matrix: Matrix | None) -> str:
    if matrix is None:
        return "the original lacks this weight"
    if len(matrix.shape) != 2:
        return f"its shape is {list(matrix.shape)}, expected a matrix"
    rows, columns = matrix.shape
    if rows % _ROWS_MULTIPLE:
        return f"its {rows} rows are not a multiple of {_ROWS_MULTIPLE}"
    if columns % GROUP:
        return f"its {columns} columns are not a multiple of {GROUP}"
    return ""


def check_original(original: Checkpoint) -> None:
    where = str(original.directory)
    if read_config(original.directory).get("quantization_config"):
        raise ValidationError(where, "is already quantized", _ORIGINAL_FIX)
    for name in sorted(original.owner):
        dtype = original.tensor(name).dtype
        if dtype not in _FLOAT_DTYPES:
            raise ValidationError(
                where, f"{name} is {dtype}, expected a floating-point dtype", _ORIGINAL_FIX
            )


def check_result(original: Checkpoint, result: Checkpoint) -> dict[str, Any]:
    """Check that the result is the rounded original; return measurements for the receipt."""
    if result.duplicates:
        name = min(result.duplicates)
        raise ValidationError(str(result.directory), f"has {name} in several files", _FIX)
    packed = sorted(name.removesuffix(QWEIGHT) for name in result.owner if name.endswith(QWEIGHT))
    quantization = read_config(result.directory).get("quantization_config")
    expected = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True}
    if not isinstance(quantization, Mapping) or not expected.items() <= quantization.items():
        where = f"{result.directory}/{CONFIG_NAME}"
        raise ValidationError(where, f"lacks {expected} in quantization_config", _FIX)
    for module in packed:
        _check_packed_shapes(module, original, result)
    kept = [name for name in result.owner if name in original.owner]
    for name in kept:
        if not _is_same(name, original, result):
            raise ValidationError(name, "must stay unchanged, but differs from the original", _FIX)
    step = max(1, -(-len(packed) // _MAX_COMPARED))
    errors = {module: relative_error(module, original, result) for module in packed[::step]}
    # `not <=` also finds NaN.
    wrong = {module: error for module, error in errors.items() if not error <= INT4_LIMIT}
    if wrong:
        module = max(wrong, key=lambda module: wrong[module])
        difference = f"differs from the original's weight by {wrong[module]:.0%}"
        raise ValidationError(module, f"{difference}; number of wrong modules: {len(wrong)}", _FIX)
    mean = float(np.mean(list(errors.values())))
    error = {"modules": len(errors), "mean": mean, "worst": max(errors.values())}
    check_kept_experts(original, result)
    return {"packed_modules": len(packed), "error": error}


def _check_packed_shapes(module: str, original: Checkpoint, result: Checkpoint) -> None:
    expected = number_formats.packed_tensors(_require_weight(module, original).shape, bits=4)
    for suffix, (dtype, shape) in expected.items():
        tensor = result.tensor(module + suffix)
        dtypes = SIXTEEN_BIT if dtype == "BF16" else {dtype}
        if tensor.dtype not in dtypes or tensor.shape != shape:
            problem = f"is {tensor.dtype} {list(tensor.shape)}, expected {list(shape)}"
            raise ValidationError(module + suffix, problem, _FIX)


def check_kept_experts(original: Checkpoint, result: Checkpoint) -> int:
    """Check 16-bit experts that were split from a fused tensor; return their number."""
    count = 0
    for name in sorted(result.owner.keys() - original.owner.keys()):
        if not name.endswith(WEIGHT):
            continue
        expert = find_fused_expert(name.removesuffix(WEIGHT), original)
        if expert is None:
            continue
        count += 1
        has_same_bytes = _hash(expert.span) == _hash(result.span(name))
        if not has_same_bytes or expert.shape != result.tensor(name).shape:
            raise ValidationError(name, "must stay unchanged, but differs from the original", _FIX)
    return count


def _is_same(name: str, original: Checkpoint, result: Checkpoint) -> bool:
    before, after = original.tensor(name), result.tensor(name)
    if before.dtype != after.dtype:  # AutoRound converts small tensors
        return np.array_equal(_read_floats(original, name), _read_floats(result, name))
    if before.shape != after.shape:
        return False
    return _hash(original.span(name)) == _hash(result.span(name))


def relative_error(module: str, original: Checkpoint, result: Checkpoint) -> float:
    matrix = _require_weight(module, original)
    weight = to_floats(read_span(matrix.span), matrix.dtype, matrix.shape)
    return number_formats.relative_error(weight, unpack_weight(result, module))


def unpack_weight(checkpoint: Checkpoint, module: str) -> Floats:
    scales = _read_floats(checkpoint, f"{module}.scales")
    return number_formats.unpack_int4(read_span(checkpoint.span(module + QWEIGHT)), scales)


def _require_weight(module: str, original: Checkpoint) -> Matrix:
    matrix = find_weight(module, original)
    if matrix is None:
        fix = "set sources.original to the 16-bit repository of this model"
        raise ValidationError(str(original.directory), f"lacks the weight of {module}", fix)
    return matrix


def _read_floats(checkpoint: Checkpoint, name: str) -> Floats:
    tensor = checkpoint.tensor(name)
    return to_floats(read_span(checkpoint.span(name)), tensor.dtype, tensor.shape)


def _hash(span: Span) -> str:
    return hash_file(span.path, offset=span.offset, size_bytes=span.size_bytes)
