# ruff: noqa: E402 - what may be missing is asked for first
"""The head's kernels compiled for a Spark (12.1), without one: do they fit, and do they spill?

Needs triton, which brings its own assembler and cuobjdump; no GPU. `make kernels` brings it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs triton: make kernels")
pytest.importorskip("torch", reason="needs torch: make kernels")

from spark_vllm.head import kernel as kernels
from spark_vllm.head.quantise import GROUP_SIZE
from spark_vllm.head.table import Tile, read_table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SPARK = GPUTarget("cuda", 121, 32)
SHARED_BYTES = 99 * 1024
"""What a block of threads may have on 12.x."""
REGISTERS = 65536
TILES = read_table()["12.1"]
SPILLED_BYTES = {("odd", None): 176}
"""Known, for heads whose sizes are no multiples of 16; none of our models has such a one."""
POINTERS = ("x_ptr", "x_scale_ptr", "weight_ptr", "scale_ptr", "out_ptr", "halves_ptr")
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], even: bool, **options: int
) -> Any:
    """Compile for a Spark as at run time: pointers aligned; ``even``: sizes multiples of 16."""
    names = kernel.arg_names
    aligned = [*POINTERS, *(("rows", "in_features") if even else ())]
    attributes = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in aligned
    }
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=SPARK, options=options)


def usage(found: Any, directory: Path) -> dict[str, int]:
    """Return what cuobjdump says of registers, stack and local memory."""
    path = directory / "kernel.cubin"
    path.write_bytes(found.asm["cubin"])
    text = subprocess.run(
        [TOOL, "-res-usage", path], check=True, capture_output=True, text=True
    ).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


def head(tile: Tile, even: bool = True) -> Any:
    x = "*i8" if tile.split else "*bf16"
    scale = "*fp32" if tile.split else "*bf16"
    types = {"x_ptr": x, "x_scale_ptr": scale, "weight_ptr": "*i8", "scale_ptr": "*bf16"}
    types |= {"out_ptr": "*bf16", "batch": "i32", "rows": "i32", "in_features": "i32"}
    constants = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "GROUP": GROUP_SIZE,
        "GROUPS_PER_STEP": tile.groups_per_step,
        "SPLIT": tile.split,
        "BATCH_FIRST": tile.batch_first,
        "EVEN_K": even,
        "BULK": tile.bulk_copies,
        "EARLY": tile.early,
        "KEEP": tile.keep_output,
    }
    types["groups"] = "i32"
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return compiled(kernels._logits_kernel, types, constants, even, **options)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"to-{tile.max_batch}")
@pytest.mark.parametrize("shape", ["ours", "odd"])
def test_every_tile_of_a_spark_fits_and_spills_no_more_than_is_known(
    tile: Tile, shape: str, tmp_path: Path
) -> None:
    found = head(tile, even=shape == "ours")
    used = usage(found, tmp_path)
    assert found.metadata.shared <= SHARED_BYTES
    assert used["REG"] * tile.warps * 32 <= REGISTERS
    assert used["STACK"] + used["LOCAL"] <= SPILLED_BYTES.get((shape, tile.max_batch), 0)


def test_splitting_activations_spills_nothing(tmp_path: Path) -> None:
    types = {"x_ptr": "*bf16", "halves_ptr": "*i8", "x_scale_ptr": "*fp32", "batch": "i32"}
    types |= {"in_features": "i32", "groups": "i32"}
    constants = {"GROUP": GROUP_SIZE, "LARGEST": kernels.LARGEST_HALF_SUM, "EARLY": False}
    used = usage(compiled(kernels._split_kernel, types, constants, True, num_warps=1), tmp_path)
    assert used["STACK"] + used["LOCAL"] == 0


def test_a_tile_that_spills_and_one_that_does_not_fit_are_noticed(tmp_path: Path) -> None:
    spilling, large = Tile(None, 64, 256, 1, True, 4, 2, 0), Tile(None, 64, 256, 1, False, 4, 5, 0)
    used = usage(head(spilling), tmp_path)
    assert used["STACK"] + used["LOCAL"] > 0
    assert head(large).metadata.shared > SHARED_BYTES
