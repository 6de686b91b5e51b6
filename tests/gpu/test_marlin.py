"""``VLLM_MARLIN_USE_ATOMIC_ADD``, which other recipes set: affected modules, times and errors.

It applies to modules with less than 2,048 outputs and at least 2,048 inputs: a single INT4 module
each in the 122B and the 35B.
"""

import sys
from pathlib import Path

import pytest

from proofs import result_files

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proofs/kernels"))

REACHED = {"122B in_proj_ba": (3072, 128), "35B in_proj_ba": (2048, 64)}
NOT_REACHED = {
    "122B in_proj_qkvz": (3072, 20480),
    "122B out_proj": (8192, 3072),
    "122B qkv_proj": (3072, 17408),
    "35B out_proj": (4096, 2048),
}
BATCHES = (1, 3, 12)
NEAR = 0.01
"""Adding partial sums in BF16 costs 0.007; the default kernel adds in FP32."""


def _module(inputs, outputs):
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import marlin_quantize
    from vllm.scalar_type import scalar_types

    torch.manual_seed(0)
    weight = torch.randn(inputs, outputs, device="cuda").bfloat16() * 0.02
    _, packed, scales = marlin_quantize(weight, scalar_types.uint4b8, 128)
    scratch = marlin_utils.marlin_make_workspace_new(torch.device("cuda"))
    return packed, scales, scratch


def _product(x, module, outputs, atomic):
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types

    packed, scales, scratch = module
    return ops.marlin_gemm(
        x, None, packed, None, scales, None, None, None, scratch, scalar_types.uint4b8,
        size_m=x.shape[0], size_n=outputs, size_k=x.shape[1],
        use_atomic_add=atomic, use_fp32_reduce=True,
    )  # fmt: skip


def _wants(inputs, outputs, monkeypatch):
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    monkeypatch.setenv("VLLM_MARLIN_USE_ATOMIC_ADD", "1")
    device = torch.device("cuda")
    return bool(
        marlin_utils.should_use_atomic_add_reduce(1, outputs, inputs, device, torch.bfloat16)
    )


@pytest.mark.parametrize("name", [*REACHED, *NOT_REACHED])
def test_marlin_atomic_add_applies_only_to_narrow_modules(name, monkeypatch, results):
    shape = {**REACHED, **NOT_REACHED}[name]
    reached = _wants(*shape, monkeypatch)
    passed = reached is (name in REACHED)
    word = "reached" if name in REACHED else "not reached"
    result_files.record_row(results, "marlin-atomic-add", f"{name}: {word}", passed, shape=shape)
    assert passed


@pytest.mark.parametrize("name", REACHED)
def test_marlin_is_repeatable_without_atomic_add_and_accurate_with_it(name, results):
    from timing import graph_us

    inputs, outputs = REACHED[name]
    module = _module(inputs, outputs)
    for batch in BATCHES:
        x = torch.randn(batch, inputs, device="cuda").bfloat16()
        plain = _product(x, module, outputs, False).clone()
        atomic = [_product(x, module, outputs, True).clone() for _ in range(100)]
        repeats = sum(not torch.equal(output, atomic[0]) for output in atomic)
        plain_repeats = sum(
            not torch.equal(_product(x, module, outputs, False), plain) for _ in range(100)
        )
        error = float((atomic[0].float() - plain.float()).norm() / plain.float().norm())
        times = {
            word: round(graph_us(lambda x=x, on=on: _product(x, module, outputs, on)), 2)
            for word, on in (("default_us", False), ("atomic_us", True))
        }
        claim = f"{name}, batch {batch}: without it the same bits 100 times; as near with it"
        result_files.record_row(
            results, "marlin-atomic-add", claim, plain_repeats == 0 and error < NEAR,
            other_bits_of_100=repeats, error=round(error, 5), **times,
        )  # fmt: skip
        assert plain_repeats == 0
        assert error < NEAR
