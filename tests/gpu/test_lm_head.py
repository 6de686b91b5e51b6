import dataclasses

import pytest

torch = pytest.importorskip("torch")

from spark_vllm.head.choice import read_table, tile_for  # noqa: E402 # after the skip

TILES = sorted(read_table().items())
ROUNDING = 0.003
BATCHES = [1, 2, 3, 8, 9, 12, 16, 17, 24, 32, 33, 64, 65, 200]
"""Batches on both sides of every limit of the shipped tables."""


def _head(rows, in_features):
    from spark_vllm.head.compute import dequantize_rows, quantize_rows

    weight = torch.randn(rows, in_features, device="cuda").bfloat16()
    values, scales = quantize_rows(weight, rows_per_block=700)
    return weight, values, scales, dequantize_rows(values, scales, in_features).double()


def _error(value, reference):
    return float((value.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize(("name", "tiles"), TILES)
@pytest.mark.parametrize(("rows", "in_features"), [(2000, 3072), (1999, 2048), (515, 3000)])
def test_every_lm_head_tile_gives_correct_logits_for_every_batch_size(
    name, tiles, rows, in_features
):
    from spark_vllm.head.kernel import logits

    torch.manual_seed(0)
    _, values, scales, dequantized = _head(rows, in_features)
    for batch in (1, 2, 7, 8, 9, 16, 33, 64, 200, 512):
        x = torch.randn(batch, in_features, device="cuda").bfloat16()
        reference = x.double() @ dequantized.t()
        for tile in {tile_for(batch, tiles), *tiles}:
            for resident in (0, 1):
                used = dataclasses.replace(tile, programs_per_processor=resident)
                assert _error(logits(x, values, scales, used, 4), reference) < ROUNDING, used


def test_quantizing_lm_head_in_blocks_equals_quantizing_it_at_once():
    from spark_vllm.head.compute import quantize_rows

    weight = torch.randn(1000, 300, device="cuda").bfloat16()
    for in_blocks, at_once in zip(
        quantize_rows(weight, 64), quantize_rows(weight, 10**6), strict=True
    ):
        assert torch.equal(in_blocks, at_once)


def test_quantizing_lm_head_needs_extra_memory_for_fewer_than_five_blocks():
    from spark_vllm.head.compute import ROWS_PER_BLOCK, quantize_rows

    weight = torch.randn(16 * ROWS_PER_BLOCK, 1024, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    values, scales = quantize_rows(weight)
    torch.cuda.synchronize()
    extra_bytes = torch.cuda.max_memory_allocated() - before - values.nbytes - scales.nbytes
    assert extra_bytes < 5 * ROWS_PER_BLOCK * 1024 * 4


def test_replayed_cuda_graph_of_lm_head_uses_new_inputs():
    from spark_vllm.head.kernel import logits

    _, values, scales, dequantized = _head(1024, 512)
    for tile in read_table()["12.1"]:
        x = torch.randn(9, 512, device="cuda").bfloat16()
        logits(x, values, scales, tile, 48)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = logits(x, values, scales, tile, 48)
        x.copy_(torch.randn_like(x))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert _error(out, x.double() @ dequantized.t()) < ROUNDING


@pytest.mark.parametrize(("name", "tiles"), TILES)
@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_non_finite_activation_affects_only_the_logits_of_its_row(name, tiles, damage, results):
    from spark_vllm.head.kernel import logits

    from proofs import result_files

    torch.manual_seed(0)
    _, values, scales, _ = _head(2000, 3072)
    wrong = []
    for batch in (1, 3, 16, 33):
        x = torch.randn(batch, 3072, device="cuda").bfloat16()
        x[batch // 2, 1000] = damage
        for tile in {tile_for(batch, tiles), *tiles}:
            finite = torch.isfinite(logits(x, values, scales, tile, 4)).cpu()
            expected = torch.ones_like(finite)
            expected[batch // 2] = False
            if not torch.equal(finite, expected):
                wrong.append(str(tile))
    claim = f"tiles {name}: one activation of {damage} makes all logits of that row not finite"
    result_files.record_row(results, "lm-head-nan", claim, not wrong, wrong=wrong)
    assert not wrong


def test_int8_lm_head_error_is_below_one_percent_on_gaussian_weights():
    from spark_vllm.head.kernel import logits

    torch.manual_seed(0)
    weight, values, scales, _ = _head(4096, 3072)
    x = torch.randn(16, 3072, device="cuda").bfloat16()
    reference = x.double() @ weight.double().t()
    for tile in read_table()["default"]:
        assert _error(logits(x, values, scales, tile, 4), reference) < 0.01


@pytest.mark.parametrize(("name", "tiles"), TILES)
@pytest.mark.parametrize(("rows", "in_features"), [(2000, 3072), (1999, 2048), (515, 3000)])
def test_logits_are_bit_identical_at_every_batch_size(name, tiles, rows, in_features, results):
    from spark_vllm.head.kernel import logits

    from proofs import result_files

    torch.manual_seed(0)
    _, values, scales, _ = _head(rows, in_features)
    x = torch.randn(BATCHES[-1], in_features, device="cuda").bfloat16()
    logits_of = {
        batch: logits(x[:batch].clone(), values, scales, tile_for(batch, tiles), 4)
        for batch in BATCHES
    }
    whole = logits_of[BATCHES[-1]]
    other = [batch for batch, part in logits_of.items() if not torch.equal(part, whole[:batch])]
    again = logits(x, values, scales, tile_for(len(x), tiles), 4)
    claim = f"tiles {name}, {rows} x {in_features}: the same bits at every batch, and again"
    passed = not other and torch.equal(again, whole)
    result_files.record_row(results, "lm-head-batches", claim, passed, batches=BATCHES, other=other)
    assert passed, other


def test_logits_differ_for_a_tile_with_different_arithmetic():
    from spark_vllm.head.kernel import logits

    torch.manual_seed(0)
    _, values, scales, _ = _head(2000, 3072)
    x = torch.randn(4, 3072, device="cuda").bfloat16()
    tile = read_table()["12.1"][0]
    other = dataclasses.replace(tile, split=not tile.split)
    assert not torch.equal(logits(x, values, scales, tile, 4), logits(x, values, scales, other, 4))
