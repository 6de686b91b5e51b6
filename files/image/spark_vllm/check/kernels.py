"""Compile the head's kernels for a Spark with the image's Triton, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from spark_vllm.head.choice import GROUP_SIZE, Tile, read_table

SPARK = 121  # compute capability 12.1
SHARED_BYTES = 99 * 1024
"""Shared memory limit per thread block on compute capability 12.x."""
REGISTERS = 65536
SHAPES = ("aligned", "odd")
_POINTERS = ("x_ptr", "x_scale_ptr", "weight_ptr", "scale_ptr", "out_ptr", "halves_ptr")


class Usage(NamedTuple):
    shared_bytes: int
    registers: int
    spilled_bytes: int


def compile_kernels() -> tuple[list[str], list[str]]:
    """Compile all kernels; return errors and notes."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TRITON_CACHE_DIR"] = scratch  # keep the cache out of the image
        try:
            usages = dict(compile_all())
        except ImportError as error:
            return [], [f"the LM head kernels could not be compiled: {error}"]
        except Exception as error:  # an incompatible Triton, or an assembler without sm_121
            message = f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
            if type(error).__name__ == "PTXASError":
                return [f"the LM head kernels: the assembler rejects sm_{SPARK}: {message}"], []
            return [], [f"the LM head kernels could not be compiled: {message}"]
    problems = [
        f"{name}: needs {usage.shared_bytes} bytes of shared memory, but a Spark has {SHARED_BYTES}"
        for name, usage in usages.items()
        if usage.shared_bytes > SHARED_BYTES
    ]
    notes = [f"{len(usages)} LM head kernels compiled for a Spark"]
    if spilling := [name for name, usage in usages.items() if usage.spilled_bytes]:
        notes.append(f"slow because of register spills: {', '.join(spilling)}")
    return problems, notes


def compile_all() -> Iterator[tuple[str, Usage]]:
    for tile in read_table()["12.1"]:
        yield f"head (row limit: {tile.max_batch or 'none'})", compile_head(tile)
    yield "splitting of activations", compile_splitting()


def compile_head(tile: Tile, shape: str = "aligned") -> Usage:
    """Compile the logits kernel for sizes that are multiples of 16 (``aligned``) or are ``odd``."""
    from spark_vllm.head import kernel

    x = "*i8" if tile.split else "*bf16"
    scale = "*fp32" if tile.split else "*bf16"
    types = {"x_ptr": x, "x_scale_ptr": scale, "weight_ptr": "*i8", "scale_ptr": "*bf16"}
    types |= {"out_ptr": "*bf16", "batch": "i32", "rows": "i32", "in_features": "i32"}
    types["groups"] = "i32"
    constants = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "GROUP": GROUP_SIZE,
        "GROUPS_PER_STEP": tile.groups_per_step,
        "SPLIT": tile.split,
        "BATCH_FIRST": tile.batch_first,
        "EVEN_K": shape == "aligned",
        "BULK": tile.bulk_copies,
        "EARLY": tile.early,
        "KEEP": tile.keep_output,
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return _compile(kernel._logits_kernel, types, constants, shape, options)


def compile_splitting() -> Usage:
    from spark_vllm.head import kernel

    types = {"x_ptr": "*bf16", "halves_ptr": "*i8", "x_scale_ptr": "*fp32", "batch": "i32"}
    types |= {"in_features": "i32", "groups": "i32"}
    constants = {"GROUP": GROUP_SIZE, "LARGEST": kernel.LARGEST_HALF_SUM, "EARLY": False}
    return _compile(kernel._split_kernel, types, constants, "aligned", {"num_warps": 1})


def _compile(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    shape: str,
    options: dict[str, int],
) -> Usage:
    """Compile a kernel for a Spark, with aligned pointers as at run time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    aligned = [*_POINTERS, *(("rows", "in_features") if shape == "aligned" else ())]
    attributes = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name in aligned
    }
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", SPARK, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return Usage(int(compiled.metadata.shared), used["REG"], used["STACK"] + used["LOCAL"])
