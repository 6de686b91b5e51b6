import re

import numpy as np
import pytest
from builder_judge import (
    MODULE,
    donor_values,
    exchange,
    exchange_gate_and_up,
    fill,
    refused,
    relative,
    set_first,
)
from builder_shards import BLOCK, Raw, bf16_tensor, bf16_values, fp8_pair
from builder_trees import DONOR_SHAPES, SWAP
from spark_checkpoint import ValidationError, tensor_sets

NAME_SETS = ("base_tensors", "donor_unmatched", "mtp_tensors")


def name_error(missing, surplus=()):
    with pytest.raises(ValidationError) as refusal:
        tensor_sets.check_same_names("base", "tensors", set(surplus), set(missing))
    return str(refusal.value)


def test_tensor_name_error_lists_ten_tensors_and_counts_the_rest():
    missing = sorted(f"layers.{layer}.q.{part}" for layer in range(12) for part in ("a", "b"))
    message = name_error(missing, ["layers.0.q.c"])
    assert "missing 24 (12 x layers.{N}.q.a, 12 x layers.{N}.q.b)" in message
    assert f": {', '.join(missing[:10])}, 14 more, surplus 1 " in message
    assert ": layers.0.q.c; fix: " in message


CAUSES = {
    ".linear_attn.": "model.language_model.layers.0.linear_attn.in_proj_qkv.qweight",
    ".self_attn.": "model.language_model.layers.0.self_attn.q_proj.qweight",
    ".shared_expert.": f"{MODULE}.up_proj.qweight",
    ".mlp.experts.": "model.language_model.layers.0.mlp.experts.2.up_proj.qweight",
    "lm_head": "lm_head.qweight",
    ".visual.": "model.visual.blocks.0.attn.qkv.weight",
    "mtp": "mtp.layers.0.self_attn.q_proj.qweight",
}


@pytest.mark.parametrize("part", [*tensor_sets._CAUSES, "mtp"])
def test_tensor_name_error_includes_the_likely_cause(part):
    cause = tensor_sets._CAUSES.get(part, tensor_sets._MTP_CAUSE)
    assert re.search(r", likely ([^;]+); fix: ", name_error([CAUSES[part]]))[1] == cause


def rename_norm(workshop):
    raw = workshop.base.pop("model.language_model.norm.weight")
    workshop.base["model.language_model.final_norm.weight"] = raw


def add_donor_tensor(workshop):
    workshop.donor["model.language_model.layers.0.surprise.weight"] = bf16_tensor(np.ones(4))


WRONG_NAMES = {
    "a renamed base tensor": (
        rename_norm,
        "missing 1 (1 x model.language_model.norm.weight)",
        "surplus 1 (1 x model.language_model.final_norm.weight)",
    ),
    "a surplus donor tensor": (
        add_donor_tensor, "surplus 1 (1 x model.language_model.layers.{N}.surprise.weight)",
    ),
    "a missing donor scale": (
        lambda workshop: workshop.donor.pop(f"{MODULE}.up_proj.weight_scale_inv"),
        "missing 1 (1 x model.language_model.layers.{N}.mlp.shared_expert.up_proj",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_NAMES)
def test_rejects_sources_with_wrong_tensor_names(workshop, case):
    change, *problems = WRONG_NAMES[case]
    plan = workshop.plan()
    change(workshop)
    message = refused(workshop, **{key: plan[key] for key in NAME_SETS})
    assert all(problem in message for problem in problems)


WRONG_PLANS = {
    "modules that the base lacks": (
        {"swap": [SWAP.replace("{0..3}", "{0..4}")]},
        "modules to swap: 12 names, expected 15",
    ),
    "other shapes": (
        {
            "donor_shapes": [
                {**DONOR_SHAPES[0], "weight": [256, 256], "scale": [2, 2]}, DONOR_SHAPES[1]
            ]
        },
        ".gate_proj.weight: has shape [128, 256], but the plan's donor_shapes require [256, 256]",
    ),
    "shapes of other modules": (
        {"donor_shapes": DONOR_SHAPES[:1]},
        "donor_shapes: modules of the plan: 8 names, expected 12",
    ),
}  # fmt: skip


COUNTS = [
    ("num_hidden_layers", 3),
    ("num_hidden_layers", 5),
    ("num_experts", 1),
    ("num_experts", 3),
]


@pytest.mark.gate
@pytest.mark.parametrize(("key", "count"), COUNTS)
def test_rejects_layer_and_expert_counts_that_differ_from_the_plan(workshop, key, count):
    """The engine would skip tensors, or fill layers that the checkpoint lacks."""
    right = {"num_hidden_layers": 4, "num_experts": 2}
    workshop.write_base()
    workshop.change_base_config(lambda c: c["text_config"].update({**right, key: count}))
    assert f"{key} is {count}, but the tensors in the model file are for {right[key]}" in refused(
        workshop
    )


def test_accepts_layer_and_expert_counts_that_match_the_plan(workshop):
    workshop.write_base()
    workshop.change_base_config(lambda c: c["text_config"].update(num_experts=2))
    assert workshop.build().returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG_PLANS)
def test_rejects_sources_that_differ_from_plan(workshop, case):
    changes, problem = WRONG_PLANS[case]
    assert problem in refused(workshop, **changes)


def test_rejects_base_weights_that_are_not_16_bit(workshop):
    workshop.base[f"{MODULE}.up_proj.weight"] = Raw("F32", (128, 256), bytes(128 * 256 * 4))
    assert "is F32 [128, 256], expected a 16-bit matrix" in refused(workshop)


@pytest.mark.parametrize("shape", [(0, 256), (128, 0)])
@pytest.mark.parametrize("recipe", ["fp8-self", "int8-g128"])
def test_rejects_empty_matrices(workshop, recipe, shape):
    workshop.base[f"{MODULE}.up_proj.weight"] = Raw("BF16", shape, b"")
    choices = {"shared_experts": recipe, "layout": "full", "donor": None, "donor_unmatched": []}
    message = refused(workshop, **choices)
    assert f"up_proj.weight is BF16 {list(shape)}, expected a 16-bit matrix" in message


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [DONOR_SHAPES, []], ids=["planned", "not planned"])
@pytest.mark.parametrize("suffix", ["weight", "weight_scale_inv"])
def test_rejects_transposed_donor_tensors(workshop, suffix, shapes):
    name = f"{MODULE}.up_proj.{suffix}"
    raw = workshop.donor[name]
    workshop.donor[name] = Raw(raw.dtype, raw.shape[::-1], raw.data)
    message = refused(workshop, donor_shapes=shapes)
    assert f"donor {name}: " in message
    assert ("donor_shapes" in message) == bool(shapes)


def extra_config(value):
    return lambda config: config["quantization_config"].update(extra_config=value)


CONFIGS = {
    "no quantization": (lambda config: config.pop("quantization_config"), "quantization_config"),
    "a list": (lambda config: config.update(quantization_config=[]), "quantization_config"),
    "no method": (
        lambda config: config["quantization_config"].pop("quant_method"),
        "has no quant_method",
    ),
    "a list of modules": (extra_config(["lm_head"]), "a key per module, but is a list"),
    "a text": (extra_config("lm_head"), "a key per module, but is a str"),
    "tied": (lambda config: config.update(tie_word_embeddings=True), "has tied embeddings"),
    "tied below": (
        lambda config: config["text_config"].update(tie_word_embeddings=True),
        "has tied embeddings",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_rejects_invalid_config_before_reading_donor_or_shards(workshop, hub, case):
    change, problem = CONFIGS[case]
    workshop.write_base()
    workshop.change_base_config(change)
    url = f"{hub.url}/lab/tiny-fp8/resolve/{'d' * 40}"
    donor = {"url": url, "tries": 8, "backoff_s": 1.0}
    message = refused(workshop, head="int8-g128", layout="full", donor=donor)
    assert "config.json: " in message
    assert problem in message
    assert not hub.requests
    assert list(workshop.out.parent.glob(".*/*")) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("sym", False), ("bits", 2), ("data_type", "mx_fp"), ("packing_format", "auto_round")],
)
def test_rejects_a_base_in_a_format_that_the_plugin_cannot_load(workshop, key, value):
    workshop.change_base_config(lambda config: config["quantization_config"].update({key: value}))
    assert f"quantization_config.{key} is {value!r}, expected " in refused(workshop)
    workshop.build(shared_experts="keep")


@pytest.mark.parametrize(
    "choice", [{}, {"shared_experts": "int8-g128", "layout": "full"}, {"head": "int8-g128"}]
)
def test_accepts_null_as_module_config(workshop, choice):
    workshop.change_base_config(extra_config(None))
    workshop.build(**choice)
    assert isinstance(workshop.quantization()["extra_config"], dict)


def edit_weight(change, dtype=np.uint8, suffix="weight"):
    def inflict(donor):
        raw = donor[f"{UP}.{suffix}"]
        matrix = np.frombuffer(raw.data, dtype).reshape(raw.shape).copy()
        donor[f"{UP}.{suffix}"] = Raw(raw.dtype, raw.shape, change(matrix).tobytes())

    return inflict


def flip_byte(matrix):
    matrix.reshape(-1)[4321] ^= 0x18
    return matrix


UP = f"{MODULE}.up_proj"
SCALES = {"dtype": "<u2", "suffix": "weight_scale_inv"}
OTHER = "FP8 source differs from the base's weight by "
BAD_SCALES = "FP8 source scales must be finite and positive"
DAMAGES = {
    "a flipped byte": (edit_weight(flip_byte), "differ from the base by more than rounding"),
    "gate and up exchanged": (exchange_gate_and_up, OTHER),
    "another layer's tensor": (
        lambda donor: exchange(donor, UP, UP.replace("layers.1", "layers.2")),
        OTHER,
    ),
    # The grid is square, so shapes do not reveal it.
    "transposed scales": (edit_weight(np.transpose, **SCALES), OTHER),
    "a transposed weight": (edit_weight(np.transpose), OTHER),
    "all zero": (fill(f"{UP}.weight", b"\0"), "weight in the FP8 source is all zero"),
    "a block of zeros": (
        edit_weight(lambda matrix: np.hstack([matrix[:, :BLOCK] * 0, matrix[:, BLOCK:]])),
        OTHER,
    ),
    "bytes reversed": (edit_weight(lambda matrix: matrix.reshape(-1)[::-1]), OTHER),
    "a scale of zero": (set_first(f"{UP}.weight_scale_inv", b"\0\0"), BAD_SCALES),
    "an infinite scale": (set_first(f"{UP}.weight_scale_inv", b"\x80\x7f"), BAD_SCALES),
    "a negative scale": (set_first(f"{UP}.weight_scale_inv", b"\0\xbc"), BAD_SCALES),
    "a NaN weight": (set_first(f"{UP}.weight", b"\x7f"), "weight in the FP8 source has NaN codes"),
}


@pytest.fixture
def square(workshop):
    for name in [module for module in workshop.modules if not module.endswith("down_proj")]:
        half = bf16_values(workshop.base[f"{name}.weight"])
        values = np.vstack([half, half[::-1] * 9])
        values[:, BLOCK:] *= 3
        raw = workshop.base[f"{name}.weight"] = bf16_tensor(values)
        assert raw.shape == (2 * BLOCK, 2 * BLOCK)
        pair = fp8_pair(bf16_values(raw))
        workshop.donor[f"{name}.weight"], workshop.donor[f"{name}.weight_scale_inv"] = pair
    return workshop


def test_accepts_an_undamaged_donor(square):
    square.build(donor_shapes=[])


@pytest.mark.parametrize("damage", DAMAGES)
def test_rejects_wrong_values_in_tensors_with_correct_names_and_shapes(square, damage):
    inflict, problem = DAMAGES[damage]
    inflict(square.donor)
    message = refused(square, donor_shapes=[])
    assert message.startswith("error: model.language_model.layers.")
    assert problem in message


def test_reports_the_fp8_rounding_error(workshop):
    workshop.build()
    report = workshop.read("receipt.json")["report"]["shared_experts"]
    expected = [
        relative(donor_values(workshop.donor, m), bf16_values(workshop.base[f"{m}.weight"]))
        for m in workshop.modules
    ]
    assert report["relative_error_max"] == pytest.approx(max(expected), rel=1e-3)
    assert 0.02 < report["relative_error_mean"] < 0.03
