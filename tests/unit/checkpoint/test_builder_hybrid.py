"""A prebuilt hybrid as the base: it passes the same gates, held against the donor."""

import json

import numpy as np
import pytest
from builder_judge import MODULE, refused
from builder_shards import BLOCK, Raw, bf16_tensor, bf16_values, e4m3_values, fp8_pair
from builder_trees import run_tool


@pytest.fixture
def hybrid(workshop):
    """Return a workshop whose base is somebody else's hybrid of the same two repositories."""
    scheme = workshop.plan()
    for module in workshop.modules:
        for suffix in ("weight", "weight_scale_inv"):
            workshop.base[f"{module}.{suffix}"] = workshop.donor[f"{module}.{suffix}"]
    workshop.choices = {
        "shared_experts": "fp8-base",
        "layout": "full",
        "base_tensors": scheme["base_tensors"],
        "donor_unmatched": scheme["donor_unmatched"],
    }
    return workshop


def write(workshop):
    workshop.write_base()
    workshop.write_donor()


def test_a_prebuilt_hybrid_becomes_the_tree_that_a_build_from_the_base_makes(hybrid):
    write(hybrid)
    hybrid.build(**hybrid.choices)
    assert hybrid.result() == {**hybrid.base, **hybrid.mtp}
    config = json.loads((hybrid.out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "spark_inc"
    assert sorted(config["fp8_block"]["modules"]) == hybrid.modules
    report = json.loads((hybrid.out / "receipt.json").read_text())["report"]
    assert report["shared_experts"]["modules"] == len(hybrid.modules)
    assert report["shared_experts"]["relative_error_max"] == 0
    run_tool("verify", hybrid.out, "--full")


def test_its_head_can_be_packed_as_that_of_any_base(hybrid):
    write(hybrid)
    hybrid.build(**hybrid.choices, head="int8-g128")
    assert "lm_head.qweight" in hybrid.result()


def test_a_hybrid_quantised_from_the_same_weights_by_another_rule_passes(hybrid):
    weight, scale = (hybrid.base[f"{MODULE}.up_proj.{n}"] for n in ("weight", "weight_scale_inv"))
    codes = np.frombuffer(weight.data, np.uint8).reshape(weight.shape)
    grid = np.repeat(np.repeat(bf16_values(scale), BLOCK, 0), BLOCK, 1)
    values = e4m3_values(codes) * grid[: weight.shape[0], : weight.shape[1]]
    pair = fp8_pair((values * 1.003).astype(np.float32))
    hybrid.base[f"{MODULE}.up_proj.weight"], hybrid.base[f"{MODULE}.up_proj.weight_scale_inv"] = (
        pair
    )
    write(hybrid)
    hybrid.build(**hybrid.choices)


def exchange(base):
    for suffix in ("weight", "weight_scale_inv"):
        one, other = f"{MODULE}.gate_proj.{suffix}", f"{MODULE}.up_proj.{suffix}"
        base[one], base[other] = base[other], base[one]


def lose_a_scale(base):
    del base[f"{MODULE}.up_proj.weight_scale_inv"]


def zero_a_weight(base):
    raw = base[f"{MODULE}.up_proj.weight"]
    base[f"{MODULE}.up_proj.weight"] = Raw(raw.dtype, raw.shape, bytes(len(raw.data)))


def keep_one_in_16_bit(base):
    base[f"{MODULE}.up_proj.weight"] = bf16_tensor(np.ones((128, 256), np.float32))


def turn_a_grid(base):
    raw = base[f"{MODULE}.up_proj.weight_scale_inv"]
    base[f"{MODULE}.up_proj.weight_scale_inv"] = Raw(raw.dtype, raw.shape[::-1], raw.data)


WRONG = {
    "gate and up exchanged": (exchange, "differs from the base's own weight"),
    "a scale missing": (lose_a_scale, "missing 1 (1 x model.language_model.layers.{N}.mlp.shared"),
    "a weight all zero": (zero_a_weight, "differs from the base's own weight"),
    "one weight left in 16 bit": (keep_one_in_16_bit, "is BF16 [128, 256], expected F8_E4M3"),
    "a grid turned round": (turn_a_grid, "up_proj.weight_scale_inv: is BF16 [2, 1], expected"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_hybrid_that_is_not_what_it_claims_is_refused(hybrid, case):
    damage, said = WRONG[case]
    damage(hybrid.base)
    write(hybrid)
    assert said in refused(hybrid, **hybrid.choices)


def test_an_int4_base_does_not_pass_for_a_hybrid(workshop):
    write(workshop)
    message = refused(workshop, shared_experts="fp8-base", layout="full")
    assert f"missing {len(workshop.modules)} " in message


@pytest.mark.parametrize(
    ("change", "said"),
    [({"layout": "overlay"}, "set layout to full"), ({"donor": None}, "no donor")],
)
def test_a_plan_that_cannot_be_proven_is_refused(hybrid, change, said):
    write(hybrid)
    assert said in refused(hybrid, code=2, **{**hybrid.choices, **change})
