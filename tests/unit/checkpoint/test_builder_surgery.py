"""What is refused, grafted, packed and proven between base and result."""

import json
import random

import numpy as np
import pytest
from builder_trees import (
    BLOCK,
    VOCABULARY,
    Raw,
    bf16_tensor,
    bf16_values,
    e4m3_values,
    fp8_pair,
    read_shard,
    run_tool,
    write_shard,
)

LAYOUTS = ("overlay", "full")
MODULE = "model.language_model.layers.1.mlp.shared_expert"
HEAD_INT8 = {"bits": 8, "group_size": 128, "sym": True, "data_type": "int"}


def scale_values(raw):
    return bf16_values(raw)


def donor_values(donor, module):
    weight, scale = donor[f"{module}.weight"], donor[f"{module}.weight_scale_inv"]
    codes = np.frombuffer(weight.data, np.uint8).reshape(weight.shape)
    scales = np.repeat(np.repeat(scale_values(scale), BLOCK, 0), BLOCK, 1)
    return e4m3_values(codes) * scales[: weight.shape[0], : weight.shape[1]]


def unpack_int8(tensors, module, suffix=""):
    """Dequantise GPTQ-packed INT8 by definition: four values a word, low byte first."""
    qweight = tensors[f"{module}.qweight{suffix}"]
    words = np.frombuffer(qweight.data, "<u4").reshape(qweight.shape)
    codes = np.stack([(words >> (8 * n)) & 255 for n in range(4)], axis=1)
    codes = codes.reshape(-1, qweight.shape[1]).astype(np.float64) - 128
    scales = bf16_values(tensors[f"{module}.scales{suffix}"])
    return (codes * np.repeat(scales, 128, axis=0)).T


def relative(found, expected):
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# --- gates -------------------------------------------------------------------------------------


def refused(workshop, code=3, **changes):
    before = workshop.base_hashes()
    done = workshop.build(check=False, **changes)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "; fix: " in done.stderr
    assert not workshop.out.exists()
    assert workshop.base_hashes() == before
    return done.stderr


def test_a_base_with_16_bit_attention_is_refused_and_named(workshop):
    plan = workshop.plan()
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
    assert "surplus 8" in message
    assert "attention projections are quantised differently" in message


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


@pytest.mark.parametrize("suffix", ["weight", "weight_scale_inv"])
def test_donor_tensors_of_another_shape_are_refused(workshop, suffix):
    raw = workshop.donor[f"{MODULE}.up_proj.{suffix}"]
    turned = Raw(raw.dtype, raw.shape[::-1], raw.data)
    workshop.donor[f"{MODULE}.up_proj.{suffix}"] = turned
    workshop.write_base()
    workshop.write_donor()
    assert f"donor {MODULE}.up_proj.{suffix}: is " in refused(workshop)


# --- spot check --------------------------------------------------------------------------------


def swap_names(donor, one, other):
    for suffix in ("weight", "weight_scale_inv"):
        a, b = f"{one}.{suffix}", f"{other}.{suffix}"
        donor[a], donor[b] = donor[b], donor[a]


def turn_scales(donor):
    # A square grid, so that the shape gate cannot see the turn.
    raw = donor[f"{MODULE}.up_proj.weight_scale_inv"]
    grid = np.frombuffer(raw.data, "<u2").reshape(raw.shape)
    donor[f"{MODULE}.up_proj.weight_scale_inv"] = Raw(
        raw.dtype, raw.shape, np.ascontiguousarray(grid[:, ::-1]).tobytes()
    )


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


PLANTED = {
    "one byte flipped": flip_one_byte,
    "gate and up exchanged": lambda donor: swap_names(
        donor, f"{MODULE}.gate_proj", f"{MODULE}.up_proj"
    ),
    "another layer's tensor": lambda donor: swap_names(
        donor, f"{MODULE}.up_proj", f"{MODULE.replace('layers.1', 'layers.2')}.up_proj"
    ),
    "scales turned round": turn_scales,
    "all zero": zero_part,
    "one block zero": zero_block,
    "bytes reversed": reverse_data,
    "a scale of zero": plant_scale(0),
    "an infinite scale": plant_scale(0x7F80),
    "a negative scale": plant_scale(0xBC00),
    "a NaN weight": plant_nan,
}


@pytest.mark.parametrize("damage", PLANTED)
def test_a_wrong_donor_with_right_names_and_shapes_is_refused(workshop, damage):
    # Blocks of different size, or turned scales would be right by accident.
    for part in ("gate_proj", "up_proj"):
        values = bf16_values(workshop.base[f"{MODULE}.{part}.weight"]).copy()
        values[:, BLOCK:] *= 3
        raw = workshop.base[f"{MODULE}.{part}.weight"] = bf16_tensor(values)
        pair = fp8_pair(bf16_values(raw))
        workshop.donor[f"{MODULE}.{part}.weight"] = pair[0]
        workshop.donor[f"{MODULE}.{part}.weight_scale_inv"] = pair[1]
    workshop.write_base()
    PLANTED[damage](workshop.donor)
    workshop.write_donor()
    message = refused(workshop)
    assert "model.language_model.layers." in message
    assert "donor" in message


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


# --- duplicates and MTP ------------------------------------------------------------------------


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


# --- INT8 and own FP8 --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_packed_head_dequantises_to_the_bases_head(workshop, layout):
    workshop.write_base()
    workshop.write_donor()
    workshop.build(layout=layout, head="int8-g128")
    result = workshop.result()
    suffix = "_int8" if layout == "overlay" else ""
    assert "lm_head.weight" not in result
    shapes = {n: result[f"lm_head.{n}{suffix}"] for n in ("qweight", "scales", "qzeros")}
    assert (shapes["qweight"].dtype, shapes["qweight"].shape) == ("I32", (64, VOCABULARY))
    assert (shapes["scales"].dtype, shapes["scales"].shape) == ("BF16", (2, VOCABULARY))
    assert (shapes["qzeros"].dtype, shapes["qzeros"].shape) == ("I32", (2, VOCABULARY // 4))
    expected = bf16_values(workshop.base["lm_head.weight"])
    error = relative(unpack_int8(result, "lm_head", suffix), expected)
    report = json.loads((workshop.out / "receipt.json").read_text())["report"]["head"]
    assert report["relative_error"] == pytest.approx(error, rel=1e-3)
    assert report["relative_error"] < report["relative_error_by_maximum"] < 0.01
    config = json.loads((workshop.out / "config.json").read_text())
    assert config["quantization_config"]["extra_config"]["lm_head"] == HEAD_INT8
    assert config["quantization_config"]["spark"]["head"] == "int8-g128"


def test_a_vocabulary_the_engine_would_pad_is_refused_for_the_packed_head(workshop):
    workshop.base["lm_head.weight"] = bf16_tensor(np.ones((VOCABULARY - 4, 256), np.float32))
    workshop.donor["lm_head.weight"] = workshop.base["lm_head.weight"]
    workshop.write_base()
    workshop.write_donor()
    assert "no multiple of 64" in refused(workshop, head="int8-g128")


def test_a_tied_head_is_refused_for_packing(workshop):
    workshop.write_base()
    workshop.write_donor()
    config = json.loads((workshop.base_dir / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = True
    (workshop.base_dir / "config.json").write_text(json.dumps(config))
    workshop.write_receipt()
    assert "ties the head to the embeddings" in refused(workshop, head="int8-g128")


def test_int8_shared_experts_need_no_donor_and_stay_plain_auto_round(workshop):
    workshop.write_base()
    workshop.build(
        layout="full", shared_experts="int8-g128", head="int8-g128", donor=None, donor_unmatched=[]
    )
    result = workshop.result()
    for module in workshop.modules:
        assert f"{module}.weight" not in result
        expected = bf16_values(workshop.base[f"{module}.weight"])
        assert relative(unpack_int8(result, module), expected) < 0.01
    quantization = json.loads((workshop.out / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "auto-round"
    assert "fp8_block" not in quantization
    assert quantization["extra_config"][workshop.modules[0]] == HEAD_INT8


def test_int8_shared_experts_in_an_overlay_are_refused_with_the_way_out(workshop):
    workshop.write_base()
    message = refused(workshop, code=2, shared_experts="int8-g128", donor=None)
    assert "set layout to full" in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_fp8_is_as_good_as_the_donors_and_needs_none(workshop, layout):
    workshop.write_base()
    workshop.build(layout=layout, shared_experts="fp8-self", donor=None, donor_unmatched=[])
    result = workshop.result()
    suffix = "_fp8" if layout == "overlay" else ""
    for module in workshop.modules:
        for part in ("weight", "weight_scale_inv"):
            # The donor of these tests is made by the same rule, in other code.
            assert result[f"{module}.{part}{suffix}"] == workshop.donor[f"{module}.{part}"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keep_changes_no_tensor_and_stays_plain_auto_round(workshop, layout):
    workshop.write_base()
    workshop.build(layout=layout, shared_experts="keep", donor=None, donor_unmatched=[])
    assert workshop.result() == {**workshop.base, **workshop.mtp}
    quantization = json.loads((workshop.out / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "auto-round"


def test_odd_sizes_leave_every_tensor_aligned(workshop):
    names = list(workshop.base)
    random.Random(3).shuffle(names)
    workshop.base = {name: workshop.base[name] for name in names}
    workshop.base["model.language_model.layers.0.mlp.shared_expert_gate.weight"] = Raw(
        "BF16", (1, 3), bytes(6)
    )
    workshop.write_base()
    workshop.write_donor()
    workshop.build(layout="full", head="int8-g128")
    item = {"I32": 4, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
    for shard in workshop.out.glob("*.safetensors"):
        raw = shard.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        assert length % 8 == 0
        for entry in json.loads(raw[8 : 8 + length]).values():
            if "dtype" in entry:
                assert entry["data_offsets"][0] % item[entry["dtype"]] == 0
    run_tool("verify", workshop.out, "--full")
