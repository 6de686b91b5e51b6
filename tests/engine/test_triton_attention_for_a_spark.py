"""The kernels of the engine's Triton attention, over caches with a scale per token and head,
compiled for a Spark (12.1): shared memory and register spills.

Needs triton (`make kernels`), which includes an assembler and cuobjdump; no GPU.
"""

import pytest

pytest.importorskip("triton", reason="needs triton: make kernels")

from engine_triton_attention import FILES, launches
from spark_vllm.check.kernels import SHARED_BYTES
from wheel_sources import fetch

ENGINE = "0.33.0"
CASES = ((32, 16, 1), (32, 4112, 16), (16, 2064, 5))
"""Query heads (122B, 35B), smallest block of the engine or of INT8 tokens that holds a GDN state,
requests. Triton compiles 1 and multiples of 16 separately."""
MOST_SHARED_BYTES = 21 * 1024
SPLIT = ["kernel_unified_attention", "reduce_segments"]
CORE = {
    "store": ["_reshape_cache_per_token_head"],
    "decode": SPLIT,
    "verify": SPLIT,
    "prompt": SPLIT[:1],
}
PACKED = {
    "store": ["_reshape_cache_int4_kernel"],
    "decode": ["_attn_packed", "reduce_segments"],
    "verify": ["_attn_packed"],
    "prompt": ["_attn_packed"],
}
KERNELS = {
    "int8_per_token_head": CORE,
    "fp8_per_token_head": CORE,
    "int4_per_token_head": PACKED,
}


@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_with_scales_per_token_compile_for_a_spark_without_register_spills(kind):
    root = fetch(ENGINE, FILES)
    for heads, block, requests in CASES:
        steps = launches(root, kind, heads, block, requests)
        names = {step: [usage.kernel for usage in used] for step, used in steps.items()}
        assert names == KERNELS[kind]
        used = [usage for usages in steps.values() for usage in usages]
        assert {usage.architecture for usage in used} == {"sm_121a"}
        limit = min(SHARED_BYTES, MOST_SHARED_BYTES)
        assert [usage for usage in used if usage.shared_bytes > limit] == []
        assert [usage for usage in used if usage.spilled_bytes] == []


def test_formats_match_the_engine_backend():
    backend = next(file for file in FILES if file.endswith("triton_attn.py"))
    listed = (fetch(ENGINE, FILES) / backend).read_text()
    listed = listed.partition("supported_kv_cache_dtypes")[2].partition("]\n")[0]
    assert {name for name in listed.split('"') if name.endswith("per_token_head")} == set(KERNELS)
