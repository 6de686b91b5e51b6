"""Spreading the scales changes no function and no code, only scales."""

import numpy as np
import pytest

from lab.model import original, rounding
from lab.model.shape import TINY
from lab.model.spread import spread

LAYER = "model.language_model.layers.{}."


@pytest.fixture(scope="module")
def before():
    return original.random_weights(TINY, 3)


@pytest.fixture(scope="module")
def after(before):
    return spread(TINY, before)


@pytest.mark.parametrize(
    ("norm", "reader"),
    [
        ("0.input_layernorm", "0.linear_attn.in_proj_a"),
        ("3.input_layernorm", "3.self_attn.q_proj"),
        ("1.post_attention_layernorm", "1.mlp.gate"),
        ("1.post_attention_layernorm", "1.mlp.shared_expert_gate"),
        ("2.post_attention_layernorm", "2.mlp.experts.4.gate_proj"),
    ],
)
def test_what_a_norm_feeds_stays_the_same(before, after, norm, reader):
    names = [f"{LAYER[:-3]}{part}.weight" for part in (norm, reader)]
    products = [(1 + w[names[0]]) * w[names[1]] for w in (before, after)]
    np.testing.assert_allclose(products[1], products[0], rtol=1e-5, atol=1e-9)
    assert np.abs(after[names[1]] / before[names[1]] - 1).min() > 0.4


@pytest.mark.parametrize("part", ["shared_expert", "experts.7"])
def test_an_expert_stays_the_same(before, after, part):
    prefix = LAYER.format(3) + f"mlp.{part}."
    norm = LAYER.format(3) + "post_attention_layernorm.weight"
    hidden = np.random.default_rng(0).normal(size=TINY.hidden)

    def output(weights):
        gate, up, down = (weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = hidden * (1 + weights[norm])
        gated = gate @ x
        return down @ (gated / (1 + np.exp(-gated)) * (up @ x))

    np.testing.assert_allclose(output(after), output(before), rtol=1e-4)


def test_attention_values_stay_the_same(before, after):
    prefix = LAYER.format(3) + "self_attn."
    norm = LAYER.format(3) + "input_layernorm.weight"

    def output(weights):
        values = weights[f"{prefix}v_proj.weight"] * (1 + weights[norm])
        heads = values.reshape(TINY.kv_heads, TINY.head_dim, -1)
        each = heads.repeat(TINY.heads // TINY.kv_heads, axis=0).reshape(-1, TINY.hidden)
        return weights[f"{prefix}o_proj.weight"] @ each

    np.testing.assert_allclose(output(after), output(before), rtol=1e-3, atol=1e-8)


def test_int4_codes_are_untouched_and_scales_of_neighbouring_groups_differ(before, after):
    name = LAYER.format(0) + "linear_attn.in_proj_qkv.weight"
    packed = [rounding.int4(weights[name]) for weights in (before, after)]
    assert packed[0]["qweight"].data == packed[1]["qweight"].data
    scales = np.frombuffer(packed[1]["scales"].data, "<f2").reshape(2, -1).astype(np.float32)
    assert (scales[0] > 8 * scales[1]).all()


def test_the_mtp_layer_and_the_vision_tower_are_left_alone(before, after):
    same = [name for name in before if name.startswith(("mtp.", "model.visual."))]
    assert len(same) == 41 + 33
    assert all(after[name] is before[name] for name in same)
