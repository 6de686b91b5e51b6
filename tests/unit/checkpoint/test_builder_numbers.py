import numpy as np
import pytest
from builder_shards import bf16, e4m3_codes, e4m3_values
from hypothesis import given, settings
from hypothesis import strategies as st
from spark_checkpoint.number_formats import (
    GROUP,
    bf16_bits,
    from_bf16_bits,
    from_e4m3,
    quantize_blocks,
    quantize_rows,
    reduce_blocks,
    repeat_scales,
    to_e4m3,
    to_floats,
)

from tests.unit.examples import examples

FINITE = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)


def test_decodes_every_finite_e4m3_code():
    assert np.array_equal(from_e4m3(FINITE), e4m3_values(FINITE))
    assert np.isnan(from_e4m3(np.array([0x7F, 0xFF], np.uint8))).all()
    assert from_e4m3(np.array([0x7E], np.uint8))[0] == 448
    assert np.array_equal(to_e4m3(from_e4m3(FINITE)), FINITE)


def test_rounds_ties_to_the_even_code():
    values = from_e4m3(np.arange(0x7F, dtype=np.uint8)).astype(np.float64)
    halves = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    codes = to_e4m3(halves)
    assert not (codes % 2).any()
    assert np.array_equal(to_e4m3(-halves), codes | 0x80)


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=64))
def test_rounds_to_the_nearest_e4m3_value(values):
    values = np.array(values, np.float32)
    assert np.array_equal(to_e4m3(values), e4m3_codes(values))


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=64))
def test_converts_bf16_both_ways(values):
    values = np.array(values, np.float32)
    assert np.array_equal(bf16_bits(values), bf16(values))
    assert np.array_equal(bf16_bits(from_bf16_bits(bf16(values))), bf16(values))
    raw = bf16(values).tobytes()
    assert np.array_equal(to_floats(raw, "BF16", values.shape), from_bf16_bits(bf16(values)))


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 255), (7, 300), (256, 384)])
def test_block_scales_include_partial_blocks_at_the_edges(shape):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 97
    sums, maxima = (
        reduce_blocks(function, values, (128, 128)) for function in (np.add, np.maximum)
    )
    for i in range(sums.shape[0]):
        for j in range(sums.shape[1]):
            part = values[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
            assert sums[i, j] == pytest.approx(part.sum())
            assert maxima[i, j] == part.max()
    assert repeat_scales(maxima, shape, (128, 128)).shape == shape


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-39])
def test_block_without_usable_weights_gets_a_positive_scale(value):
    codes, scales = quantize_blocks(np.full((128, 256), value, np.float32), (128, 128))
    assert not codes.any()
    assert (from_bf16_bits(scales) > 0).all()


def group_error(group, scale):
    codes = np.clip(np.rint(group / scale), -128, 127)
    return float(np.square(codes * scale - group, dtype=np.float64).sum())


def test_int8_rounding_chooses_the_nearby_scale_with_the_least_error():
    weights = (np.random.default_rng(5).standard_normal((8, 2 * GROUP)) * 0.02).astype(np.float32)
    result = quantize_rows(weights, 8)
    for row in range(8):
        for number in range(2):
            group = weights[row, number * GROUP : (number + 1) * GROUP]
            bits = int(result.scales[row, number])
            chosen = group_error(group, from_bf16_bits(np.array([bits], np.uint16))[0])
            largest = bf16_bits(np.array([np.abs(group).max() / 127], np.float32))[0]
            for other in range(int(largest) - 6, int(largest) + 2):
                scale = from_bf16_bits(np.array([other], np.uint16))[0]
                assert chosen <= group_error(group, scale) * (1 + 1e-5)


@pytest.mark.parametrize("value", [0.0, 1e-38, -1e18, 1e-45])
def test_int8_scales_stay_finite_for_extreme_weights(value):
    weights = np.full((1, GROUP), value, np.float32)
    result = quantize_rows(weights, 8)
    scales = from_bf16_bits(result.scales)
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    back = (result.codes.astype(np.float32) - 128) * scales
    assert np.allclose(back, weights, rtol=0.02, atol=1e-37)
