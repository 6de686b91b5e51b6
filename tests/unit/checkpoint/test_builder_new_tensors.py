import json
import random

import numpy as np
import pytest
from builder_judge import (
    LAYOUTS,
    MODULE,
    donor_values,
    exchange_gate_and_up,
    fill,
    refused,
    relative,
    set_first,
    set_last,
    unpack_packed,
)
from builder_shards import (
    ITEM_BYTES,
    Raw,
    bf16_tensor,
    bf16_values,
    fp8_pair,
    read_shard,
    write_shard,
)
from builder_trees import HIDDEN, VOCABULARY, run_tool

HEAD_INT8 = {"bits": 8, "group_size": 128, "sym": True, "data_type": "int"}
NO_DONOR = {"donor": None, "donor_unmatched": []}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_lm_head_dequantizes_to_the_base_lm_head(workshop, layout):
    workshop.build(layout=layout, head="int8-g128")
    result = workshop.result()
    suffix = "_int8" if layout == "overlay" else ""
    assert "lm_head.weight" not in result
    for part, expected in {
        "qweight": ("I32", (64, VOCABULARY)),
        "scales": ("BF16", (2, VOCABULARY)),
        "qzeros": ("I32", (2, VOCABULARY // 4)),
    }.items():
        tensor = result[f"lm_head.{part}{suffix}"]
        assert (tensor.dtype, tensor.shape) == expected
    head = bf16_values(workshop.base["lm_head.weight"])
    error = relative(unpack_packed(result, "lm_head", suffix), head)
    report = workshop.read("receipt.json")["report"]["head"]
    assert report["relative_error"] == pytest.approx(error, rel=1e-3)
    assert report["relative_error"] < 0.01
    assert workshop.quantization()["extra_config"]["lm_head"] == HEAD_INT8
    assert workshop.quantization()["spark"]["head"] == "int8-g128"


@pytest.mark.parametrize(
    ("rows", "value", "problem"),
    [(VOCABULARY - 4, 1, "a multiple of 64"), (VOCABULARY, np.nan, "lm_head.weight: has NaN")],
)
def test_rejects_lm_heads_that_cannot_be_packed(workshop, rows, value, problem):
    head = bf16_tensor(np.full((rows, HIDDEN), value, np.float32))
    workshop.base["lm_head.weight"] = workshop.donor["lm_head.weight"] = head
    assert problem in refused(workshop, head="int8-g128")


def test_int8_shared_experts_need_neither_donor_nor_plugin(workshop):
    choices = {"shared_experts": "int8-g128", "head": "int8-g128", **NO_DONOR}
    workshop.build(layout="full", **choices)
    result = workshop.result()
    for module in workshop.modules:
        assert f"{module}.weight" not in result
        expected = bf16_values(workshop.base[f"{module}.weight"])
        assert relative(unpack_packed(result, module), expected) < 0.01
    quantization = workshop.quantization()
    assert quantization["quant_method"] == "auto-round"
    assert "fp8_block" not in quantization
    assert quantization["extra_config"][workshop.modules[0]] == HEAD_INT8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_self_built_fp8_equals_fp8_built_from_a_donor_rounded_the_same_way(workshop, layout):
    workshop.build(layout=layout, shared_experts="fp8-self", **NO_DONOR)
    result = workshop.result()
    suffix = "_fp8" if layout == "overlay" else ""
    for module in workshop.modules:
        for part in ("weight", "weight_scale_inv"):
            assert result[f"{module}.{part}{suffix}"] == workshop.donor[f"{module}.{part}"]


@pytest.mark.parametrize("recipe", ["fp8-self", "int8-g128"])
def test_rejects_nan_in_weights_that_it_quantizes(workshop, recipe):
    name = f"{workshop.modules[0]}.weight"
    set_last(name, b"\xc0\x7f")(workshop.base)
    message = refused(workshop, shared_experts=recipe, layout="full", **NO_DONOR)
    assert f"{name}: has NaN or infinite values" in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_keep_setting_leaves_tensors_unchanged(workshop, layout):
    workshop.build(layout=layout, shared_experts="keep", **NO_DONOR)
    assert workshop.result() == {**workshop.base, **workshop.mtp}
    assert workshop.quantization()["quant_method"] == "auto-round"


def test_aligns_tensors_that_follow_odd_sized_tensors(workshop):
    names = list(workshop.base)
    random.Random(3).shuffle(names)
    workshop.base = {name: workshop.base[name] for name in names}
    odd = "model.language_model.layers.0.mlp.shared_expert_gate.weight"
    workshop.base[odd] = Raw("BF16", (1, 3), bytes(6))
    workshop.build(layout="full", head="int8-g128")
    for shard in workshop.out.glob("*.safetensors"):
        raw = shard.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        assert length % 8 == 0
        for entry in json.loads(raw[8 : 8 + length]).values():
            if "dtype" in entry:
                assert entry["data_offsets"][0] % ITEM_BYTES[entry["dtype"]] == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_duplicate_tensor_is_written_once_from_its_indexed_shard(workshop, layout):
    workshop.write_base()
    name = "model.language_model.layers.0.post_attention_layernorm.weight"
    right = workshop.base[name]
    first, *later = sorted(workshop.base_dir.glob("model-0*.safetensors"))
    [owner] = [shard.name for shard in later if name in read_shard(shard)]
    write_shard(first, {**read_shard(first), name: right._replace(data=bytes(len(right.data)))})
    workshop.write_receipt()
    workshop.build(layout=layout)
    assert workshop.index()[name] == owner
    assert workshop.result()[name] == right
    if layout == "full":
        shards = workshop.out.glob("*.safetensors")
        assert [path.name for path in shards if name in read_shard(path)] == [owner]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shard_that_the_base_index_omits_replaces_no_indexed_tensor(workshop, layout):
    workshop.write_base()
    name = "model.language_model.norm.weight"
    right = workshop.base[name]
    stale = {name: right._replace(data=bytes(len(right.data)))}
    write_shard(workshop.base_dir / "old.safetensors", stale)
    workshop.write_receipt()
    workshop.build(layout=layout)
    assert workshop.result()[name] == right


def test_lists_mtp_tensors_that_the_base_index_omits(workshop):
    workshop.write_base(index_mtp=False)
    workshop.build()
    assert workshop.mtp.keys() <= workshop.result().keys()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_grafts_missing_mtp_tensors_in_16_bit(workshop, layout):
    mtp, workshop.mtp = workshop.mtp, {}
    workshop.build(layout=layout)
    result = workshop.result()
    assert {name for name in result if name.startswith("mtp.")} == mtp.keys()
    for name, raw in mtp.items():
        grafted = result[name]
        assert (grafted.dtype, grafted.shape) == ("BF16", raw.shape)
        if workshop.donor[name].dtype == "BF16":
            assert grafted == workshop.donor[name]
        else:
            expected = donor_values(workshop.donor, name.removesuffix(".weight"))
            assert relative(bf16_values(grafted), expected) < 0.003
    run_tool("verify", workshop.out, "--full")


def test_rejects_plan_if_no_source_has_mtp_tensors(workshop):
    plan = workshop.plan()
    expected = {"mtp_tensors": plan["mtp_tensors"]}
    unmatched = [name for name in plan["donor_unmatched"] if name != "mtp.fc.weight"]
    workshop.mtp.pop("mtp.fc.weight")
    workshop.donor.pop("mtp.fc.weight")
    assert "MTP tensors" in refused(workshop, **expected, donor_unmatched=unmatched)
    assert "no FP8 source for" in refused(workshop, **expected, donor=None, shared_experts="keep")


FP8 = "mtp.layers.0.self_attn.q_proj.weight"
SCALE = f"{FP8}_scale_inv"
PLAIN = "mtp.fc.weight"
NORM = "mtp.norm.weight"


def put(name, raw):
    return lambda donor: donor.update({name: raw})


def put_ones(name, *shape):
    return put(name, bf16_tensor(np.ones(shape, np.float32)))


# Damage, tensor in the error, part of the error.
MTP_DAMAGES = {
    "an FP8 weight of zeros": (fill(FP8, b"\0"), FP8, "is all zero"),
    "NaN codes": (fill(FP8, b"\x7f"), FP8, "NaN or infinite"),
    "a NaN code at the end": (set_last(FP8, b"\xff"), FP8, "NaN or infinite"),
    "a scale of zero": (set_first(SCALE, b"\0\0"), FP8, "finite and positive"),
    "an infinite scale": (set_first(SCALE, b"\x80\x7f"), FP8, "finite and positive"),
    "a negative scale": (set_first(SCALE, b"\0\xbc"), FP8, "finite and positive"),
    "a scale far too large": (set_first(SCALE, b"\xc8\x42"), FP8, "has a scale of 100, but"),
    "a scale far too small": (set_first(SCALE, b"\x8c\x2b"), FP8, "has a scale of 9.9"),
    "missing scales": (lambda donor: donor.pop(SCALE), FP8, "is FP8 without block scales"),
    "a BF16 weight of NaN": (fill(PLAIN, b"\xff"), PLAIN, "NaN or infinite"),
    "a BF16 norm with an infinity": (set_last(NORM, b"\x80\x7f"), NORM, "NaN or infinite"),
    "a BF16 weight of zeros": (fill(PLAIN, b"\0"), PLAIN, "is all zero"),
    "another shape of fc": (
        put_ones(PLAIN, 3, 5), PLAIN, f"is [3, 5], expected [{HIDDEN}, {2 * HIDDEN}]",
    ),
    "a norm of another width": (
        put_ones(NORM, HIDDEN + 1), NORM, f"is [{HIDDEN + 1}], expected [{HIDDEN}]",
    ),
    "scales of another grid": (
        put_ones(SCALE, 2, 3), SCALE, "is BF16 [2, 3], expected BF16 or F32 [2, 2]",
    ),
    "integers": (
        put(NORM, Raw("I32", (HIDDEN,), bytes(4 * HIDDEN))),
        NORM,
        "is I32, expected F8_E4M3 or a 16-bit float",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", MTP_DAMAGES)
def test_rejects_damaged_mtp_tensors(workshop, damage):
    inflict, name, problem = MTP_DAMAGES[damage]
    workshop.mtp = {}
    workshop.write_base()
    inflict(workshop.donor)
    message = refused(workshop)
    assert name in message
    assert problem in message


def test_compares_grafted_mtp_tensors_with_sizes_in_the_config(workshop):
    workshop.mtp = {}
    workshop.change_base_config(
        lambda config: config["text_config"].update(moe_intermediate_size=64)
    )
    message = refused(workshop)
    assert "mtp.layers.0.mlp.experts.0." in message
    assert "64" in message


def test_accepts_all_zero_norms_in_grafted_tensors(workshop):
    workshop.mtp = {}
    workshop.write_base()
    fill(NORM, b"\0")(workshop.donor)
    workshop.build()
    assert workshop.result()[NORM] == workshop.donor[NORM]


@pytest.mark.parametrize("as_list", [False, True])
def test_lists_mtp_blocks_with_packed_tensors(workshop, as_list):
    blocks = ["model.language_model.layers", "mtp.layers"]
    int4 = "mtp.layers.0.mlp.experts.0.up_proj"
    workshop.mtp.pop(f"{int4}.weight")
    for suffix, dtype in (("qweight", "I32"), ("qzeros", "I32"), ("scales", "F16")):
        workshop.mtp[f"{int4}.{suffix}"] = Raw(dtype, (8, 8), bytes(8 * 8 * ITEM_BYTES[dtype]))
    if as_list:
        workshop.change_base_config(
            lambda config: config["quantization_config"].update(block_name_to_quantize=blocks[:1])
        )
    workshop.build(mtp_tensors=sorted(workshop.mtp))
    quantization = workshop.quantization()
    assert quantization["block_name_to_quantize"] == (blocks if as_list else ",".join(blocks))
    assert quantization["extra_config"]["mtp.layers.0.self_attn.q_proj"]["bits"] == 16
    assert int4 not in quantization["extra_config"]


def test_corrects_a_wrong_block_list_in_the_base(workshop):
    wrong = "model.language_model.layers,mtp.layers"
    workshop.change_base_config(
        lambda config: config["quantization_config"].update(block_name_to_quantize=wrong)
    )
    workshop.build()
    assert workshop.quantization()["block_name_to_quantize"] == "model.language_model.layers"


@pytest.fixture
def hybrid(workshop):
    plan = workshop.plan()
    for module in workshop.modules:
        for suffix in ("weight", "weight_scale_inv"):
            workshop.base[f"{module}.{suffix}"] = workshop.donor[f"{module}.{suffix}"]
    names = {key: plan[key] for key in ("base_tensors", "donor_unmatched")}
    workshop.choices = {"shared_experts": "fp8-base", "layout": "full", **names}
    return workshop


def test_rebuild_of_a_prebuilt_hybrid_keeps_every_tensor(hybrid):
    hybrid.build(**hybrid.choices)
    assert hybrid.result() == {**hybrid.base, **hybrid.mtp}
    assert hybrid.quantization()["quant_method"] == "spark_inc"
    assert sorted(hybrid.quantization()["fp8_block"]["modules"]) == hybrid.modules
    report = hybrid.read("receipt.json")["report"]["shared_experts"]
    assert (report["modules"], report["relative_error_max"]) == (len(hybrid.modules), 0)
    run_tool("verify", hybrid.out, "--full")


def test_packs_the_lm_head_of_a_hybrid_checkpoint(hybrid):
    hybrid.build(**hybrid.choices, head="int8-g128")
    assert "lm_head.qweight" in hybrid.result()


def test_accepts_hybrid_quantized_with_different_rounding(hybrid):
    weight, scale = f"{MODULE}.up_proj.weight", f"{MODULE}.up_proj.weight_scale_inv"
    values = donor_values(hybrid.base, f"{MODULE}.up_proj") * 1.003
    hybrid.base[weight], hybrid.base[scale] = fp8_pair(values.astype(np.float32))
    hybrid.build(**hybrid.choices)


def transpose_grid(base):
    raw = base[f"{MODULE}.up_proj.weight_scale_inv"]
    base[f"{MODULE}.up_proj.weight_scale_inv"] = Raw(raw.dtype, raw.shape[::-1], raw.data)


UP = f"{MODULE}.up_proj.weight"
WRONG_HYBRIDS = {
    "gate and up exchanged": (exchange_gate_and_up, "differs from the base's weight"),
    "a scale missing": (
        lambda base: base.pop(f"{UP}_scale_inv"),
        "missing 1 (1 x model.language_model.layers.{N}.mlp.shared",
    ),
    "a weight of zeros": (fill(UP, b"\0"), "differs from the base's weight"),
    "a weight left in 16 bit": (put_ones(UP, 128, 256), "is BF16 [128, 256], expected F8_E4M3"),
    "a transposed grid": (transpose_grid, "up_proj.weight_scale_inv: is BF16 [2, 1], expected"),
}


@pytest.mark.parametrize("case", WRONG_HYBRIDS)
def test_rejects_hybrid_that_differs_from_donor(hybrid, case):
    damage, problem = WRONG_HYBRIDS[case]
    damage(hybrid.base)
    assert problem in refused(hybrid, **hybrid.choices)


def test_rejects_int4_base_passed_as_hybrid_checkpoint(workshop):
    message = refused(workshop, shared_experts="fp8-base", layout="full")
    assert f"missing {len(workshop.modules)} " in message


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "overlay"},
        {"donor": None},
        {"shared_experts": "int8-g128", "layout": "overlay", "donor": None},
    ],
)
def test_rejects_contradictory_plans(hybrid, change):
    refused(hybrid, code=2, **{**hybrid.choices, **change})
