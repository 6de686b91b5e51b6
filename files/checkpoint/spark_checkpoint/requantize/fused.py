"""An expert's matrix inside the one tensor that newer repositories hold a layer's experts in."""

from __future__ import annotations

import re
from typing import NamedTuple

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.tree import Span, Tree
from spark_checkpoint.storage import hash_file
from spark_checkpoint.verify.gates import WEIGHT

_EXPERT = re.compile(r"^(?P<all>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj$")


class Part(NamedTuple):
    """One matrix: rows and columns, and its bytes."""

    shape: tuple[int, int]
    span: Span


def part_of(module: str, original: Tree) -> Part | None:
    """Return the matrix of an expert's module; None where no such tensor holds it."""
    found = _EXPERT.match(module)
    if not found:
        return None
    fused = f"{found['all']}.{'down_proj' if found['part'] == 'down' else 'gate_up_proj'}"
    name = next((one for one in (fused, fused + WEIGHT) if one in original.owner), None)
    if name is None or len(original.tensor(name).shape) != 3:
        return None
    experts, rows, columns = original.tensor(name).shape
    path, offset, size_bytes = original.span(name)
    size_bytes //= experts
    offset += int(found["expert"]) * size_bytes
    if int(found["expert"]) >= experts:
        return None
    if found["part"] != "down":  # the gate's rows come first
        rows, size_bytes = rows // 2, size_bytes // 2
        offset += size_bytes if found["part"] == "up" else 0
    return Part((rows, columns), Span(path, offset, size_bytes))


def check_kept_experts(original: Tree, result: Tree) -> int:
    """Refuse an expert kept in 16 bits that is not the original's; return how many there are.

    The drafter's, where it stays in 16 bits: they have names that the original does not have.
    """
    split = 0
    renamed = result.owner.keys() - original.owner.keys()
    for name in sorted(name for name in renamed if name.endswith(WEIGHT)):
        part = part_of(name.removesuffix(WEIGHT), original)
        if part is None:
            continue
        split += 1
        before, after = (
            hash_file(path, offset=offset, size_bytes=size_bytes)
            for path, offset, size_bytes in (part.span, result.span(name))
        )
        if before != after or part.shape != result.tensor(name).shape:
            what = "was to stay as it is and differs from the original"
            raise GateRefused(name, what, "look at the lines of AutoRound in the job's log")
    return split
