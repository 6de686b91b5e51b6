"""Names in two shards, and the MTP head: listed, grafted, or refused."""

import json

import numpy as np
import pytest
from builder_judge import LAYOUTS, donor_values, refused, relative
from builder_shards import Raw, bf16_tensor, bf16_values, read_shard, write_shard
from builder_trees import HIDDEN, run_tool


def duplicate(workshop, name, data):
    """Put a second copy of a base tensor into an earlier shard than its own."""
    shards = sorted(workshop.base_dir.glob("model-0*.safetensors"))
    holder = next(s for s in shards if name in read_shard(s))
    first = shards[0] if holder != shards[0] else None
    assert first is not None
    tensors = read_shard(first)
    tensors[name] = Raw(workshop.base[name].dtype, workshop.base[name].shape, data)
    write_shard(first, tensors)
    workshop.write_receipt()
    return holder.name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("differing", [False, True])
def test_a_name_in_two_shards_comes_out_once_and_the_last_file_wins(workshop, layout, differing):
    workshop.write_base()
    workshop.write_donor()
    name = "model.language_model.layers.0.post_attention_layernorm.weight"
    right = workshop.base[name]
    holder = duplicate(workshop, name, bytes(len(right.data)) if differing else right.data)
    workshop.build(layout=layout)
    index = json.loads((workshop.out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index[name] == holder
    assert workshop.result()[name] == right
    if layout == "full":
        holders = [p.name for p in workshop.out.glob("*.safetensors") if name in read_shard(p)]
        assert holders == [holder]
    report = json.loads((workshop.out / "receipt.json").read_text())["report"]
    assert report["duplicates"] == {
        "names": 1,
        "differing": int(differing),
        "rule": "last file wins",
    }


def test_mtp_tensors_the_index_forgot_are_listed_in_the_result(workshop):
    workshop.write_base(index_mtp=False)
    workshop.write_donor()
    workshop.build()
    assert workshop.mtp.keys() <= workshop.result().keys()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mtp_tensors_the_base_lost_are_grafted_from_the_donor_in_16_bit(workshop, layout):
    mtp, workshop.mtp = workshop.mtp, {}
    workshop.write_base()
    workshop.write_donor()
    workshop.build(layout=layout)
    result = workshop.result()
    assert {n for n in result if n.startswith("mtp.")} == mtp.keys()
    for name, raw in mtp.items():
        grafted = result[name]
        assert (grafted.dtype, grafted.shape) == ("BF16", raw.shape)
        if workshop.donor[name].dtype == "BF16":
            assert grafted == workshop.donor[name]
        else:
            expected = donor_values(workshop.donor, name.removesuffix(".weight"))
            assert relative(bf16_values(grafted), expected) < 0.003
    run_tool("verify", workshop.out, "--full")


def test_mtp_tensors_nobody_has_are_refused(workshop):
    expected = workshop.plan()["mtp_tensors"]
    workshop.mtp.pop("mtp.fc.weight")
    unmatched = [n for n in workshop.plan()["donor_unmatched"] if n != "mtp.fc.weight"]
    workshop.donor.pop("mtp.fc.weight")
    workshop.write_base()
    workshop.write_donor()
    message = refused(workshop, mtp_tensors=expected, donor_unmatched=unmatched)
    assert "MTP tensors to graft" in message
    message = refused(workshop, mtp_tensors=expected, donor=None, shared_experts="keep")
    assert "there is no donor to graft them from" in message


FP8 = "mtp.layers.0.self_attn.q_proj.weight"
SCALE = f"{FP8}_scale_inv"
PLAIN = "mtp.fc.weight"
NORM = "mtp.norm.weight"


def fill(name, byte):
    def plant(donor):
        raw = donor[name]
        donor[name] = Raw(raw.dtype, raw.shape, byte * len(raw.data))

    return plant


def plant_first(name, data):
    def plant(donor):
        raw = donor[name]
        donor[name] = Raw(raw.dtype, raw.shape, data + raw.data[len(data) :])

    return plant


def plant_last(name, data):
    def plant(donor):
        raw = donor[name]
        donor[name] = Raw(raw.dtype, raw.shape, raw.data[: -len(data)] + data)

    return plant


def put(name, raw):
    return lambda donor: donor.update({name: raw})


# What is planted, and the words and the tensor the refusal must name.
MTP_DAMAGES = {
    "an FP8 weight of zeros": (fill(FP8, b"\0"), FP8, "is all zero"),
    "NaN codes": (fill(FP8, b"\x7f"), FP8, "NaN or infinite"),
    "one NaN code at the end": (plant_last(FP8, b"\xff"), FP8, "NaN or infinite"),
    "a scale of zero": (plant_first(SCALE, b"\0\0"), FP8, "not all finite and above zero"),
    "an infinite scale": (plant_first(SCALE, b"\x80\x7f"), FP8, "not all finite and above zero"),
    "a negative scale": (plant_first(SCALE, b"\0\xbc"), FP8, "not all finite and above zero"),
    "a BF16 weight of NaN": (fill(PLAIN, b"\xff"), PLAIN, "NaN or infinite"),
    "a BF16 norm with one infinity": (plant_last(NORM, b"\x80\x7f"), NORM, "NaN or infinite"),
    "a BF16 weight of zeros": (fill(PLAIN, b"\0"), PLAIN, "is all zero"),
    "another shape of fc": (
        put(PLAIN, bf16_tensor(np.ones((3, 5), np.float32))),
        PLAIN,
        f"is [3, 5], expected [{HIDDEN}, {2 * HIDDEN}]",
    ),
    "a norm of another width": (
        put(NORM, bf16_tensor(np.ones(HIDDEN + 1, np.float32))),
        NORM,
        f"is [{HIDDEN + 1}], expected [{HIDDEN}]",
    ),
    "scales of another grid": (
        put(SCALE, bf16_tensor(np.ones((2, 3), np.float32))),
        SCALE,
        "is BF16 [2, 3], expected BF16 or F32 [2, 2]",
    ),
    "integers": (
        put(NORM, Raw("I32", (HIDDEN,), bytes(4 * HIDDEN))),
        NORM,
        "is I32, expected F8_E4M3 or a 16-bit float",
    ),
}


@pytest.mark.parametrize("damage", MTP_DAMAGES)
def test_mtp_tensors_that_cannot_be_what_their_names_say_are_not_grafted(workshop, damage):
    plant, name, words = MTP_DAMAGES[damage]
    workshop.mtp = {}
    workshop.write_base()
    plant(workshop.donor)
    workshop.write_donor()
    message = refused(workshop)
    assert name in message
    assert words in message


def test_an_fp8_mtp_weight_without_its_scales_is_not_grafted(workshop):
    workshop.mtp = {}
    workshop.write_base()
    workshop.donor.pop(SCALE)
    workshop.write_donor()
    assert f"{FP8}: is FP8 without block scales" in refused(workshop)


def test_sizes_in_the_config_are_held_against_grafted_mtp_tensors(workshop):
    workshop.mtp = {}
    workshop.write_base()
    config = json.loads((workshop.base_dir / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = 64
    (workshop.base_dir / "config.json").write_text(json.dumps(config))
    workshop.write_receipt()
    workshop.write_donor()
    message = refused(workshop)
    assert "mtp.layers.0.mlp.experts.0." in message
    assert "64" in message


def test_a_norm_of_zeros_is_grafted_because_an_engine_may_add_one_to_it(workshop):
    workshop.mtp = {}
    workshop.write_base()
    fill(NORM, b"\0")(workshop.donor)
    workshop.write_donor()
    workshop.build()
    assert workshop.result()[NORM] == workshop.donor[NORM]


@pytest.mark.parametrize("as_list", [False, True])
def test_blocks_to_quantise_are_named_from_the_tensors_found(workshop, as_list):
    int4 = "mtp.layers.0.mlp.experts.0.up_proj"
    raw = workshop.mtp.pop(f"{int4}.weight")
    for suffix, tensor in (("qweight", "I32"), ("qzeros", "I32"), ("scales", "F16")):
        workshop.mtp[f"{int4}.{suffix}"] = Raw(
            tensor, (8, 8), bytes(8 * 8 * (4 if tensor == "I32" else 2))
        )
    workshop.write_base()
    workshop.write_donor()
    config = json.loads((workshop.base_dir / "config.json").read_text())
    if as_list:
        config["quantization_config"]["block_name_to_quantize"] = ["model.language_model.layers"]
    (workshop.base_dir / "config.json").write_text(json.dumps(config))
    workshop.write_receipt()
    workshop.build(mtp_tensors=sorted(workshop.mtp))
    quantization = json.loads((workshop.out / "config.json").read_text())["quantization_config"]
    blocks = ["model.language_model.layers", "mtp.layers"]
    assert quantization["block_name_to_quantize"] == (blocks if as_list else ",".join(blocks))
    extra = quantization["extra_config"]
    assert extra["mtp.layers.0.self_attn.q_proj"]["bits"] == 16
    assert int4 not in extra
    assert raw.shape == (128, 256)


def test_a_wrong_block_list_of_the_base_is_put_right(workshop):
    workshop.write_base()
    workshop.write_donor()
    config = json.loads((workshop.base_dir / "config.json").read_text())
    config["quantization_config"]["block_name_to_quantize"] = (
        "model.language_model.layers,mtp.layers"
    )
    (workshop.base_dir / "config.json").write_text(json.dumps(config))
    workshop.write_receipt()
    workshop.build()
    quantization = json.loads((workshop.out / "config.json").read_text())["quantization_config"]
    assert quantization["block_name_to_quantize"] == "model.language_model.layers"
