"""Takes MTP tensors the base lacks from the donor, once they can be what their names say.

The base has nothing to compare them with, and the engine drafts with whatever it is given: a
damaged head serves right answers slowly. So values must at least be numbers. Everything is read in
pieces of a few megabytes at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from spark_checkpoint.build.staging import NewTensor, pieces_of_span
from spark_checkpoint.build.tensors.replacements import Surgery, fp8_rows
from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.index import Tensor
from spark_checkpoint.format.numbers import bf16_bits
from spark_checkpoint.format.tree import Span
from spark_checkpoint.verify.gates import FP8

_PIECE_BYTES = 1 << 20
_EXPONENT_BITS = {"BF16": 0x7F80, "F16": 0x7C00}
_FIX = "fetch the donor again, or use the FP8 repository of the same model"


def graft_mtp(names: Sequence[str], surgery: Surgery) -> None:
    """Take MTP tensors the base lacks from the donor, its FP8 ones dequantised to BF16."""
    grafted = []
    for name in names:
        entry, span = surgery.taken[name], surgery.spans[name]
        if entry.dtype == FP8:
            span = _dequantised(name, surgery)
            entry = Tensor("BF16", entry.shape, 0, span.size_bytes)
        else:
            _check_values(name, entry, pieces_of_span(span, _PIECE_BYTES))
        grafted.append(NewTensor(name, entry.dtype, entry.shape, span))
    surgery.changes.added.setdefault("", []).extend(grafted)
    surgery.changes.report["mtp_grafted"] = len(grafted)


def _dequantised(name: str, surgery: Surgery) -> Span:
    """Stage the BF16 form of an FP8 matrix, one row of blocks at a time, and check its values."""
    entry, span, scales = surgery.taken[name], surgery.spans[name], surgery.donor_scales(name)
    plain = surgery.stage.reserve(span.size_bytes * 2)

    def pieces() -> Iterator[bytes]:
        position = 0
        for rows in fp8_rows(span, scales, entry.shape[1], surgery.block):
            values = bf16_bits(rows).tobytes()
            surgery.stage.write(plain, position, values)
            position += len(values)
            yield values

    _check_values(name, entry._replace(dtype="BF16"), pieces())
    return plain


def _check_values(name: str, entry: Tensor, pieces: Iterator[bytes]) -> None:
    """Refuse NaN, infinity, and a matrix of zeros; a norm around zero may be all zero."""
    exponent = _EXPONENT_BITS[entry.dtype]
    any_nonzero = len(entry.shape) < 2
    for piece in pieces:
        words = np.frombuffer(piece, "<u2")
        if bool(((words & exponent) == exponent).any()):
            raise GateRefused(f"donor {name}", "holds NaN or infinite values", _FIX)
        any_nonzero = any_nonzero or bool((words & 0x7FFF).any())
    if not any_nonzero:
        raise GateRefused(f"donor {name}", "is all zero", _FIX)
