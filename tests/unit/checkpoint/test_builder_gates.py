"""What of base and donor is refused: other names, dtypes and shapes, and wrong values."""

import json
import re

import numpy as np
import pytest
from builder_judge import MODULE, donor_values, refused, relative
from builder_shards import BLOCK, Raw, bf16_tensor, bf16_values, fp8_pair
from builder_trees import DONOR_SHAPES
from spark_checkpoint import tensor_sets


def test_a_base_with_16_bit_attention_is_refused_and_named(workshop):
    plan, names = workshop.plan(), set(workshop.base)
    for name in [n for n in workshop.base if ".self_attn." in n]:
        raw = workshop.base.pop(name)
        if name.endswith(".qweight"):
            plain = name.replace(".qweight", ".weight")
            workshop.base[plain] = bf16_tensor(np.ones((256, 256), np.float32))
        del raw
    workshop.write_base()
    workshop.write_donor()
    message = refused(workshop, base_tensors=plan["base_tensors"])
    assert "missing 24 (4 x model.language_model.layers.{N}.self_attn.o_proj.qweight" in message
    # The first ten names exactly, then how many more.
    missing, surplus = sorted(names - workshop.base.keys()), sorted(workshop.base.keys() - names)
    assert f": {', '.join(missing[:10])}, 14 more, surplus 8" in message
    assert ", ".join(surplus) in message
    assert "attention projections are quantised differently" in message


def in_16_bit(part):
    """Plant a base that has in 16 bit what the plan wants packed."""

    def plant(workshop):
        for name in [n for n in workshop.base if f".{part}." in n and n.endswith(".qweight")]:
            inputs, outputs = workshop.base.pop(name).shape
            for suffix in ("qzeros", "scales"):
                workshop.base.pop(name.replace("qweight", suffix))
            plain = np.ones((outputs, inputs * 8), np.float32)
            workshop.base[name.replace("qweight", "weight")] = bf16_tensor(plain)

    return plant


def packed(*names):
    """Plant a base that has packed what the plan wants in 16 bit."""

    def plant(workshop):
        for name in names:
            outputs, inputs = workshop.base.pop(f"{name}.weight").shape
            words = bytes(inputs // 8 * outputs * 4)
            workshop.base[f"{name}.qweight"] = Raw("I32", (inputs // 8, outputs), words)

    return plant


def with_linear_attention(workshop):
    workshop.base["model.language_model.layers.0.linear_attn.in_proj_qkv.qweight"] = Raw(
        "I32", (8, 8), bytes(256)
    )


def with_a_third_expert(workshop):
    for name in [n for n in workshop.base if ".mlp.experts.1." in n]:
        workshop.base[name.replace(".experts.1.", ".experts.2.")] = workshop.base[name]


def with_vision(workshop):
    workshop.base["model.visual.blocks.0.attn.qkv.weight"] = bf16_tensor(np.ones((8, 8)))


def with_packed_mtp(workshop):
    workshop.mtp["mtp.layers.0.self_attn.q_proj.qweight"] = Raw("I32", (8, 8), bytes(256))


# One base for every cause that tensor_sets.py can name, and the words only that cause has.
CAUSES = {
    "linear attention": (
        with_linear_attention,
        "the linear-attention projections are quantised differently: another base generation",
    ),
    "attention": (
        in_16_bit("self_attn.q_proj"),
        "the attention projections are quantised differently: another base generation",
    ),
    "shared experts": (
        packed(f"{MODULE}.up_proj"),
        "the shared experts are quantised differently: a hybrid already, or another base",
    ),
    "experts": (with_a_third_expert, "another number of experts or layers: another model"),
    "head": (packed("lm_head"), "the head is quantised differently"),
    "vision": (with_vision, "the vision tower differs: a text-only or other checkpoint"),
    "MTP": (
        with_packed_mtp,
        "the MTP tensors differ: lost by an earlier build, or quantised differently",
    ),
}


@pytest.mark.parametrize("part", CAUSES)
def test_a_base_with_another_set_of_names_is_told_its_likely_cause_and_no_other(workshop, part):
    plan, (plant, cause) = workshop.plan(), CAUSES[part]
    plant(workshop)
    workshop.write_base()
    workshop.write_donor()
    expected = {key: plan[key] for key in ("base_tensors", "donor_unmatched", "mtp_tensors")}
    message = refused(workshop, **expected)
    assert re.search(r", likely ([^;]+); fix: ", message)[1] == cause


def test_every_cause_the_gates_can_name_is_planted_here():
    known = {*tensor_sets._CAUSES.values(), tensor_sets._MTP_CAUSE}
    assert known == {cause for _, cause in CAUSES.values()}


def test_another_name_in_place_of_one_is_refused_although_the_count_is_right(workshop):
    expected = workshop.plan()["base_tensors"]
    raw = workshop.base.pop("model.language_model.norm.weight")
    workshop.base["model.language_model.final_norm.weight"] = raw
    workshop.write_base()
    workshop.write_donor()
    message = refused(workshop, base_tensors=expected)
    assert "missing 1 (1 x model.language_model.norm.weight)" in message
    assert "surplus 1 (1 x model.language_model.final_norm.weight)" in message


def test_a_donor_with_an_unexplained_tensor_is_refused(workshop):
    expected = workshop.plan()["donor_unmatched"]
    workshop.donor["model.language_model.layers.0.surprise.weight"] = bf16_tensor(np.ones(4))
    workshop.write_base()
    workshop.write_donor()
    message = refused(workshop, donor_unmatched=expected)
    assert "donor names without a partner" in message
    assert "surplus 1 (1 x model.language_model.layers.{N}.surprise.weight)" in message


def test_a_donor_without_one_scale_is_refused(workshop):
    workshop.write_base()
    del workshop.donor[f"{MODULE}.up_proj.weight_scale_inv"]
    workshop.write_donor()
    assert "missing 1 (1 x model.language_model.layers.{N}.mlp.shared_expert.up_proj" in refused(
        workshop
    )


def test_a_swap_of_modules_the_base_lacks_is_refused(workshop):
    workshop.write_base()
    workshop.write_donor()
    swap = ["model.language_model.layers.{0..4}.mlp.shared_expert.{gate,up,down}_proj"]
    assert "modules to swap: 12 names, expected 15" in refused(workshop, swap=swap)


def test_base_weights_that_are_not_16_bit_are_refused(workshop):
    name = f"{MODULE}.up_proj.weight"
    workshop.base[name] = Raw("F32", (128, 256), bytes(128 * 256 * 4))
    workshop.write_base()
    workshop.write_donor()
    assert "is F32 [128, 256], expected a 16-bit matrix" in refused(workshop)


@pytest.mark.parametrize("shapes", [DONOR_SHAPES, []], ids=["planned", "not planned"])
@pytest.mark.parametrize("suffix", ["weight", "weight_scale_inv"])
def test_donor_tensors_of_another_shape_are_refused(workshop, suffix, shapes):
    raw = workshop.donor[f"{MODULE}.up_proj.{suffix}"]
    turned = Raw(raw.dtype, raw.shape[::-1], raw.data)
    workshop.donor[f"{MODULE}.up_proj.{suffix}"] = turned
    workshop.write_base()
    workshop.write_donor()
    said = "the plan's donor_shapes require" if shapes else "expected"
    message = refused(workshop, donor_shapes=shapes)
    assert f"donor {MODULE}.up_proj.{suffix}: is " in message
    assert said in message


def test_sources_that_agree_on_shapes_the_plan_does_not_name_are_refused(workshop):
    # Base and donor of the same other model: only the plan knows better.
    workshop.write_base()
    workshop.write_donor()
    other = [{**DONOR_SHAPES[0], "weight": [256, 256], "scale": [2, 2]}, DONOR_SHAPES[1]]
    message = refused(workshop, donor_shapes=other)
    assert ".gate_proj.weight: is [128, 256], the plan's donor_shapes require [256, 256]" in message


def test_shapes_planned_for_other_modules_than_are_swapped_are_refused(workshop):
    workshop.write_base()
    workshop.write_donor()
    message = refused(workshop, donor_shapes=DONOR_SHAPES[:1])
    assert "donor_shapes: modules of the plan: 8 names, expected 12" in message


def change_config(workshop, change):
    path = workshop.base_dir / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    workshop.write_receipt()


def extra_config(value):
    return lambda config: config["quantization_config"].update(extra_config=value)


CONFIGS = {
    "no quantization": (lambda c: c.pop("quantization_config"), "has no quantization_config"),
    "a list": (lambda c: c.update(quantization_config=[]), "has no quantization_config"),
    "a list of modules": (extra_config(["lm_head"]), "has a list as quantization_config.extra_"),
    "a text": (extra_config("lm_head"), "has a str as quantization_config.extra_config"),
    "tied": (lambda c: c.update(tie_word_embeddings=True), "ties the head to the embeddings"),
    "tied below": (
        lambda c: c["text_config"].update(tie_word_embeddings=True),
        "ties the head to the embeddings",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_nothing_can_be_made_of_is_refused_before_donor_or_shards_are_read(
    workshop, hub, case
):
    change, said = CONFIGS[case]
    workshop.write_base()
    change_config(workshop, change)
    url = f"{hub.url}/lab/tiny-fp8/resolve/{'d' * 40}"
    donor = {"url": url, "tries": 8, "backoff_s": 1.0}
    message = refused(workshop, head="int8-g128", layout="full", donor=donor)
    assert f"config.json: {said}" in message
    assert not hub.requests
    assert list(workshop.out.parent.glob(".*/*")) == []


@pytest.mark.parametrize(
    "choice", [{}, {"shared_experts": "int8-g128", "layout": "full"}, {"head": "int8-g128"}]
)
def test_null_for_the_config_of_modules_means_none(workshop, choice):
    workshop.write_base()
    workshop.write_donor()
    change_config(workshop, extra_config(None))
    workshop.build(**choice)
    config = json.loads((workshop.out / "config.json").read_text())["quantization_config"]
    assert isinstance(config["extra_config"], dict)


def swap_names(donor, one, other):
    for suffix in ("weight", "weight_scale_inv"):
        a, b = f"{one}.{suffix}", f"{other}.{suffix}"
        donor[a], donor[b] = donor[b], donor[a]


def turn_scales(donor):
    # The grid is square, so that the shape gate cannot see the turn.
    raw = donor[f"{MODULE}.up_proj.weight_scale_inv"]
    grid = np.frombuffer(raw.data, "<u2").reshape(raw.shape)
    donor[f"{MODULE}.up_proj.weight_scale_inv"] = Raw(raw.dtype, raw.shape, grid.T.tobytes())


def turn_weight(donor):
    raw = donor[f"{MODULE}.up_proj.weight"]
    codes = np.frombuffer(raw.data, np.uint8).reshape(raw.shape)
    donor[f"{MODULE}.up_proj.weight"] = Raw(raw.dtype, raw.shape, codes.T.tobytes())


def zero_part(donor):
    raw = donor[f"{MODULE}.up_proj.weight"]
    donor[f"{MODULE}.up_proj.weight"] = Raw(raw.dtype, raw.shape, bytes(len(raw.data)))


def zero_block(donor):
    raw = donor[f"{MODULE}.up_proj.weight"]
    codes = np.frombuffer(raw.data, np.uint8).reshape(raw.shape).copy()
    codes[:, :BLOCK] = 0
    donor[f"{MODULE}.up_proj.weight"] = Raw(raw.dtype, raw.shape, codes.tobytes())


def reverse_data(donor):
    raw = donor[f"{MODULE}.up_proj.weight"]
    donor[f"{MODULE}.up_proj.weight"] = Raw(raw.dtype, raw.shape, raw.data[::-1])


def plant_scale(bits):
    def plant(donor):
        raw = donor[f"{MODULE}.up_proj.weight_scale_inv"]
        data = bits.to_bytes(2, "little") + raw.data[2:]
        donor[f"{MODULE}.up_proj.weight_scale_inv"] = Raw(raw.dtype, raw.shape, data)

    return plant


def plant_nan(donor):
    raw = donor[f"{MODULE}.up_proj.weight"]
    donor[f"{MODULE}.up_proj.weight"] = Raw(raw.dtype, raw.shape, b"\x7f" + raw.data[1:])


def flip_one_byte(donor):
    raw = donor[f"{MODULE}.up_proj.weight"]
    data = bytearray(raw.data)
    data[4321] ^= 0x18
    donor[f"{MODULE}.up_proj.weight"] = Raw(raw.dtype, raw.shape, bytes(data))


OTHER = "donor differs from the base's own weight by "
BAD_SCALES = "donor scales are not all finite and above zero"
# What is done to the donor, and the words only that gate has.
PLANTED = {
    "one byte flipped": (flip_one_byte, "further from the base than rounding can put them"),
    "gate and up exchanged": (
        lambda donor: swap_names(donor, f"{MODULE}.gate_proj", f"{MODULE}.up_proj"),
        OTHER,
    ),
    "another layer's tensor": (
        lambda donor: swap_names(
            donor, f"{MODULE}.up_proj", f"{MODULE.replace('layers.1', 'layers.2')}.up_proj"
        ),
        OTHER,
    ),
    "scales turned round": (turn_scales, OTHER),
    "weight turned round": (turn_weight, OTHER),
    "all zero": (zero_part, "donor weight is all zero"),
    "one block zero": (zero_block, OTHER),
    "bytes reversed": (reverse_data, OTHER),
    "a scale of zero": (plant_scale(0), BAD_SCALES),
    "an infinite scale": (plant_scale(0x7F80), BAD_SCALES),
    "a negative scale": (plant_scale(0xBC00), BAD_SCALES),
    "a NaN weight": (plant_nan, "donor weight has NaN codes"),
}


@pytest.fixture
def square(workshop):
    """Return a workshop whose gates and ups are four blocks, each of another size than the rest.

    Otherwise what is turned round would be right by accident, or seen by its shape.
    """
    for name in [m for m in workshop.modules if not m.endswith("down_proj")]:
        half = bf16_values(workshop.base[f"{name}.weight"])
        values = np.vstack([half, half[::-1] * 9])
        values[:, BLOCK:] *= 3
        raw = workshop.base[f"{name}.weight"] = bf16_tensor(values)
        assert raw.shape == (2 * BLOCK, 2 * BLOCK)
        pair = fp8_pair(bf16_values(raw))
        workshop.donor[f"{name}.weight"], workshop.donor[f"{name}.weight_scale_inv"] = pair
    workshop.write_base()
    return workshop


def test_the_donor_that_is_damaged_below_builds_without_its_damage(square):
    square.write_donor()
    square.build(donor_shapes=[])


@pytest.mark.parametrize("damage", PLANTED)
def test_a_wrong_donor_with_right_names_and_shapes_is_refused(square, damage):
    plant, said = PLANTED[damage]
    plant(square.donor)
    square.write_donor()
    message = refused(square, donor_shapes=[])
    assert message.startswith("error: model.language_model.layers.")
    assert said in message


def test_the_spot_check_reports_the_rounding_of_fp8(workshop):
    workshop.write_base()
    workshop.write_donor()
    workshop.build()
    report = json.loads((workshop.out / "receipt.json").read_text())["report"]["shared_experts"]
    expected = [
        relative(donor_values(workshop.donor, m), bf16_values(workshop.base[f"{m}.weight"]))
        for m in workshop.modules
    ]
    assert report["relative_error_max"] == pytest.approx(max(expected), rel=1e-3)
    assert 0.02 < report["relative_error_mean"] < 0.03
