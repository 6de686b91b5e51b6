"""What is packed between base and result: INT8 and own FP8."""

import json
import random

import numpy as np
import pytest
from builder_judge import LAYOUTS, refused, relative, unpack_int8
from builder_shards import Raw, bf16_tensor, bf16_values
from builder_trees import VOCABULARY, run_tool

HEAD_INT8 = {"bits": 8, "group_size": 128, "sym": True, "data_type": "int"}


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
    assert "not a multiple of 64" in refused(workshop, head="int8-g128")


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
