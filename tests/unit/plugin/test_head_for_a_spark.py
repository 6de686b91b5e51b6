"""Compile the head's kernels for a Spark (12.1) without a GPU: size limits and register spills.

Needs triton, which includes an assembler and cuobjdump; `make kernels` installs it.
"""

import sys
from types import ModuleType

import pytest

pytest.importorskip("triton", reason="needs triton: make kernels")
try:
    import torch  # noqa: F401
except ModuleNotFoundError:  # compiling does not need it, and it is large
    sys.modules["torch"] = ModuleType("torch")

from spark_vllm.check import kernels
from spark_vllm.head.choice import Tile, read_table

TILES = read_table()["12.1"]
SPILLING = Tile(None, 64, 256, 1, True, 4, 2, 0)
LARGE = Tile(None, 64, 256, 1, False, 4, 5, 0)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"to-{tile.max_batch}")
@pytest.mark.parametrize("shape", kernels.SHAPES)
def test_every_spark_tile_compiles_without_spills(tile, shape):
    used = kernels.compile_head(tile, shape)
    assert used.shared_bytes <= kernels.SHARED_BYTES
    assert used.registers * tile.warps * 32 <= kernels.REGISTERS
    assert used.spilled_bytes == 0


def test_splitting_activations_does_not_spill():
    assert kernels.compile_splitting().spilled_bytes == 0


def test_detects_register_spills_and_too_much_shared_memory():
    assert kernels.compile_head(SPILLING).spilled_bytes > 0
    assert kernels.compile_head(LARGE).shared_bytes > kernels.SHARED_BYTES


def test_image_check_reports_compiled_kernels():
    assert kernels.compile_kernels() == (
        [],
        [f"{len(TILES) + 1} LM head kernels compiled for a Spark"],
    )


def test_kernel_check_rejects_oversized_tile_and_reports_register_spills(monkeypatch):
    monkeypatch.setattr(kernels, "read_table", lambda: {"12.1": (LARGE,)})
    [problem], _ = kernels.compile_kernels()
    assert "head (row limit: none)" in problem
    assert "a Spark has 101376" in problem
    monkeypatch.setattr(kernels, "read_table", lambda: {"12.1": (SPILLING,)})
    problems, notes = kernels.compile_kernels()
    assert problems == []
    assert "register spills: head (row limit: none)" in notes[-1]


def test_old_assembler_fails_the_build_but_unknown_triton_does_not(monkeypatch):
    def raising(error):
        def compile_all():
            raise error

        monkeypatch.setattr(kernels, "compile_all", compile_all)

    class PTXASError(Exception):
        pass

    raising(TypeError("ASTSource takes other arguments"))
    assert kernels.compile_kernels()[0] == []
    raising(PTXASError("ptxas fatal: sm_121a is not defined"))
    [problem], _ = kernels.compile_kernels()
    assert "sm_121a is not defined" in problem
