"""Cache formats that still find needles among similar keys with outlier channels.

TurboQuant: keys and values are those of the real cache slots; attention is torch, because the
backend equals attention over its slots (test_turboquant.py). Formats of the engine's Triton
attention are read through it.
"""

import pytest

from proofs import result_files

pytest.importorskip("vllm")

import torch

from proofs.kernels import needles as needle_chains
from proofs.kernels.caches import UPSTREAM, dequantize_slots, make_cache, open_backend

BLOCK, SEEDS = 16, 4
FOUND_BY_16_BIT = 0.95
LOSSES = {
    "turboquant_k8v4": (0.0, 0.02),
    "turboquant_4bit_nc": (0.02, 0.08),
    "turboquant_k3v4_nc": (0.08, 1.0),
    "turboquant_3bit_nc": (0.08, 1.0),
    "int8_per_token_head": (0.0, 0.02),
    "fp8_per_token_head": (0.0, 0.05),
    "int4_per_token_head": (0.0, 0.3),
}
"""Share of the chains found by 16 bit that the format must lose: more than, at most."""


def through_cache(preset, keys, values, monkeypatch):
    """Return attention over keys and values as a cache of this format stores them."""
    size = keys.shape[-1]
    impl = open_backend(monkeypatch.setattr, True, preset, (1, 1, size), len(keys))
    store = torch.zeros(
        (len(keys) // BLOCK, BLOCK, 1, impl.tq_config.slot_size_aligned),
        dtype=torch.uint8,
        device="cuda",
    )
    slots = torch.arange(len(keys), device="cuda")
    impl.do_kv_cache_update(
        torch.nn.Module(), keys[:, None], values[:, None], store.transpose(1, 2), slots
    )
    key, value = dequantize_slots(store.flatten(0, 1), impl.tq_config)
    return needle_chains.attend_to(key[:, 0], value[:, 0])


def through_engine(kind, keys, values):
    cache = make_cache(kind, (1, 1, keys.shape[-1]), 1, len(keys))
    cache.write(0, keys[:, None], values[:, None])
    cache.requests = needle_chains.CHAINS
    cache.table = cache.table.expand(cache.requests, -1).contiguous()
    cache.lengths = cache.lengths.expand(cache.requests).contiguous()
    return lambda query: cache.attention(query.bfloat16()[:, None])()[:, 0].float()


@pytest.mark.parametrize("preset", LOSSES)
def test_needle_recall_of_each_cache_format_meets_its_threshold(preset, monkeypatch, results):
    by_16_bit, by_format = [], []
    for seed in range(SEEDS):
        needles = needle_chains.make_needles(seed, "cuda")
        exact = needle_chains.attend_to(needles.keys, needles.values)
        if preset in UPSTREAM:
            stored = through_engine(preset, needles.keys, needles.values)
        else:
            stored = through_cache(preset, needles.keys, needles.values, monkeypatch)
        by_16_bit.append(needle_chains.find_chains(needles, exact))
        by_format.append(needle_chains.find_chains(needles, stored))
    known, found = torch.cat(by_16_bit), torch.cat(by_format)
    lost = float((known & ~found).sum() / known.sum())
    above, at_most = LOSSES[preset]
    passed = float(known.float().mean()) >= FOUND_BY_16_BIT and above <= lost <= at_most
    result_files.record_row(
        results,
        "needles",
        f"{preset}: loses {above:.0%} to {at_most:.0%} of the chains that 16 bit finds",
        passed,
        chains=len(known),
        found_by_16_bit=round(float(known.float().mean()), 4),
        found=round(float(found.float().mean()), 4),
        lost=round(lost, 4),
    )
    assert passed
