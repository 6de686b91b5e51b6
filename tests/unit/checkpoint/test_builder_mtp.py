"""Names in two shards, and the MTP head: listed, grafted, or refused."""

import json

import pytest
from builder_judge import LAYOUTS, donor_values, refused, relative
from builder_shards import Raw, bf16_values, read_shard, write_shard
from builder_trees import run_tool


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
