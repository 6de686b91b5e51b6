"""The engine's TurboQuant kernels compiled for a Spark (12.1): shared memory and register spills.

Needs triton (`make kernels`), which includes an assembler and cuobjdump; no GPU.
"""

import shutil

import pytest

pytest.importorskip("triton", reason="needs triton: make kernels")

from engine_launches import FILES, launches
from spark_vllm import SUPPORTED_ENGINES
from spark_vllm.check.kernels import SHARED_BYTES
from wheel_sources import fetch

PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
CASES = ((16, 16, True), (16, 128, False), (32, 16, False), (32, 128, True))
"""Query heads (35B, 122B), smallest or largest block of the engine, even or odd sizes."""


def kernels(preset):
    kind = "fp8" if preset == "turboquant_k8v4" else "mse"
    ends = ["_tq_decode_stage1", "_fwd_kernel_stage2", "_tq_full_dequant_kv"]
    return [f"_tq_fused_store_{kind}", *ends]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_turboquant_kernels_compile_for_a_spark_without_register_spills(version, preset):
    root = fetch(version, FILES)
    for heads, block, even in CASES:
        used = launches(root, preset, heads, block, even)
        assert [usage.kernel for usage in used] == kernels(preset)
        assert {usage.architecture for usage in used} == {"sm_121a"}
        assert [usage for usage in used if usage.shared_bytes > SHARED_BYTES] == []
        assert [usage for usage in used if usage.spilled_bytes] == []


def test_turboquant_presets_match_the_engine_backend():
    backend = next(file for file in FILES if file.endswith("turboquant_attn.py"))
    for version in SUPPORTED_ENGINES:
        text = (fetch(version, FILES) / backend).read_text()
        listed = text.partition("supported_kv_cache_dtypes")[2].partition("]\n")[0]
        assert {name for name in listed.split('"') if name.startswith("turboquant")} == set(PRESETS)


def changed(tmp_path, old, new):
    root = tmp_path / "engine"
    for file in FILES:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(fetch(SUPPORTED_ENGINES[-1], FILES) / file, root / file)
    path = root / "vllm/v1/attention/ops/triton_turboquant_decode.py"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    return launches(root, PRESETS[0], *CASES[0])


def test_kernel_check_detects_register_spills_of_a_larger_tile(tmp_path):
    spilling = changed(tmp_path, "BLOCK_KV = 4", "BLOCK_KV = 16")
    assert [usage.kernel for usage in spilling if usage.spilled_bytes] == ["_tq_decode_stage1"]
