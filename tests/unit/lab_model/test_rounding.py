"""What is packed can be unpacked by the formats' definitions, within their rounding."""

import json

import numpy as np
import pytest

from lab.model import original, rounding
from lab.model.shape import TINY
from lab.model.spread import spread
from tests.unit.lab_model import reading


@pytest.fixture(scope="module")
def weights():
    return spread(
        TINY, original.random_weights(TINY, 2)
    )  # what the newest untrained commit is made from


@pytest.fixture(scope="module")
def base(int4):
    return reading.read_tree(int4)


@pytest.fixture(scope="module")
def donor(fp8):
    return reading.read_tree(fp8)


MODULES = [
    "model.language_model.layers.0.linear_attn.in_proj_a",
    "model.language_model.layers.1.linear_attn.in_proj_qkv",
    "model.language_model.layers.3.self_attn.q_proj",
    "model.language_model.layers.2.mlp.experts.5.down_proj",
]


@pytest.mark.parametrize("module", MODULES)
def test_int4_is_within_half_a_step_of_the_original(weights, base, module):
    wanted = weights[f"{module}.weight"]
    found = reading.int4_as_float(base, module)
    step = reading.as_float(base[f"{module}.scales"]).T.repeat(128, axis=1)
    assert (np.abs(found - wanted) <= 0.5005 * step).all()


SHARED = "model.language_model.layers.0.mlp.shared_expert"


@pytest.mark.parametrize("part", ["gate_proj", "down_proj"])
def test_fp8_is_within_a_sixteenth_of_the_original(weights, donor, part):
    wanted = weights[f"{SHARED}.{part}.weight"]
    found = reading.fp8_as_float(donor, f"{SHARED}.{part}")
    assert np.abs(found - wanted).max() <= np.abs(wanted).max() / 16
    assert np.linalg.norm(found - wanted) < 0.04 * np.linalg.norm(wanted)


def test_shared_experts_are_not_square_so_a_transposed_scale_cannot_fit(donor):
    assert donor[f"{SHARED}.gate_proj.weight_scale_inv"]["shape"] == [3, 2]
    assert donor[f"{SHARED}.down_proj.weight_scale_inv"]["shape"] == [2, 3]


def test_every_e4m3_number_encodes_to_itself():
    numbers = reading.E4M3[np.isfinite(reading.E4M3)]
    codes = rounding.e4m3_codes(numbers)
    assert (reading.E4M3[codes] == numbers).all()


def test_e4m3_rounds_ties_to_even_and_saturates():
    codes = rounding.e4m3_codes(np.array([17.0, 19.0, 1e6, -1e6], np.float32))
    assert reading.E4M3[codes].tolist() == [16.0, 20.0, 448.0, -448.0]


def test_bf16_rounds_ties_to_even():
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, -2.5], np.float32)
    assert rounding.bf16_round(values).tolist() == [1.0, 1 + 2**-6, -2.5]


def test_donor_and_base_hold_the_same_16_bit_tensors(base, donor):
    both = [
        name
        for name in set(base) & set(donor)
        if not name.startswith("mtp.") and donor[name]["dtype"] != "F8_E4M3"
    ]
    assert len(both) > 60
    for name in both:
        assert bytes(base[name]["data"]) == bytes(donor[name]["data"]), name


def test_types_of_the_unquantised_are_those_of_the_real_tree(base):
    prefix = "model.language_model.layers.0.linear_attn"
    dtypes = {
        part: base[f"{prefix}.{part}"]["dtype"] for part in ("A_log", "dt_bias", "norm.weight")
    }
    assert dtypes == {"A_log": "F32", "dt_bias": "BF16", "norm.weight": "F32"}
    assert json.dumps(base["lm_head.weight"]["shape"]) == "[1024, 256]"
