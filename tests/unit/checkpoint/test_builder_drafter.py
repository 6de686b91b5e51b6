import os
import shutil

import numpy as np
import pytest
from builder_judge import LAYOUTS, refused, relative, unpack_packed
from builder_shards import bf16_tensor, bf16_values, read_shard, write_shard
from builder_trees import EXPERTS, HIDDEN, run_tool, tree_tensors

EXPERT = "mtp.layers.0.mlp.experts"
ATTENTION = "mtp.layers.0.self_attn.q_proj"
PATTERNS = [f"{EXPERT}.{{0..{EXPERTS - 1}}}.{{gate,up,down}}_proj", ATTENTION]
PACKED = [
    ATTENTION,
    *(f"{EXPERT}.{n}.{part}_proj" for n in range(EXPERTS) for part in ("gate", "up", "down")),
]
PARTS = ("qweight", "scales", "qzeros")
CHOICES = {"drafter_int4": PATTERNS}
NO_DONOR = {"donor": None, "donor_unmatched": []}
DRAFTER_FILE = "model_extra_tensors.safetensors"


def check_format(result, module, shape):
    """Require the form of the base's INT4 experts."""
    outputs, inputs = shape
    groups = inputs // 128
    for part, expected in {
        "qweight": ("I32", (inputs // 8, outputs)),
        "scales": ("BF16", (groups, outputs)),
        "qzeros": ("I32", (groups, outputs // 8)),
    }.items():
        tensor = result[f"{module}.{part}"]
        assert (tensor.dtype, tensor.shape) == expected
    assert set(result[f"{module}.qzeros"].data) == {0x77}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounds_each_weight_to_the_nearest_of_16_levels(workshop, layout):
    workshop.build(layout=layout, **CHOICES)
    result, errors = workshop.result(), []
    for module in PACKED:
        source = bf16_values(workshop.mtp[f"{module}.weight"]).astype(np.float64)
        check_format(result, module, source.shape)
        scales = np.repeat(bf16_values(result[f"{module}.scales"]).T, 128, axis=1)
        rounded = unpack_packed(result, module, bits=4)
        inside = (source > -8.5 * scales) & (source < 7.5 * scales)
        assert inside.mean() > 0.98
        assert (np.abs(rounded - source)[inside] <= scales[inside] * 0.500001).all()
        assert np.isin(np.rint(rounded / scales)[~inside], (-8, 7)).all()
        errors.append(relative(rounded, source))
    assert max(errors) < 0.12
    report = workshop.read("receipt.json")["report"]["drafter"]
    assert report["modules"] == len(PACKED)
    assert report["relative_error_max"] == pytest.approx(max(errors), rel=1e-3)
    assert run_tool("verify", workshop.out, "--full").returncode == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replaces_exactly_the_listed_weights(workshop, layout):
    workshop.build(layout=layout, shared_experts="keep", **NO_DONOR, **CHOICES)
    result = workshop.result()
    old = {f"{module}.weight" for module in PACKED}
    new = {f"{module}.{part}" for module in PACKED for part in PARTS}
    kept = {name: raw for name, raw in {**workshop.base, **workshop.mtp}.items() if name not in old}
    assert {name: raw for name, raw in result.items() if name not in new} == kept
    assert new <= result.keys()
    files = workshop.out.glob("*.safetensors")
    assert old.isdisjoint(name for path in files for name in read_shard(path))


def test_overlay_links_all_files_except_shard_of_packed_drafter(workshop):
    workshop.write_sources()
    before = workshop.base_hashes()
    workshop.build(layout="overlay", head="int8-g128", **CHOICES)
    linked = {
        path.name: os.path.samefile(path, workshop.out / path.name)
        for path in workshop.base_dir.glob("*.safetensors")
    }
    assert [name for name in linked if not linked[name]] == [DRAFTER_FILE]
    assert all(workshop.index()[f"{module}.qweight"] == DRAFTER_FILE for module in PACKED)
    assert workshop.base_hashes() == before


def test_overlay_removes_replaced_weights_from_all_files(workshop):
    workshop.write_base()
    name = f"{ATTENTION}.weight"
    first = min(workshop.base_dir.glob("model-0*.safetensors"))
    write_shard(first, {**read_shard(first), name: workshop.mtp[name]})
    workshop.write_receipt()
    workshop.build(layout="overlay", **CHOICES)
    assert all(name not in read_shard(path) for path in workshop.out.glob("*.safetensors"))
    assert workshop.result().keys() > {*workshop.base} - {
        f"{module}.weight" for module in workshop.modules
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounds_weights_grafted_from_the_donor(workshop, layout):
    workshop.build(layout=layout, **CHOICES)
    expected, workshop.mtp = workshop.result(), {}
    shutil.rmtree(workshop.base_dir)
    workshop.build(layout=layout, out=f"{workshop.out}-grafted", **CHOICES)
    grafted = tree_tensors(workshop.out.with_name(f"{workshop.out.name}-grafted"))
    assert grafted.keys() == expected.keys()
    for module in PACKED:
        errors = relative(
            *(unpack_packed(tensors, module, bits=4) for tensors in (grafted, expected))
        )
        assert errors < 0.1


def test_built_config_lists_the_packed_drafter_modules(workshop):
    sixteen = {"bits": 16, "data_type": "float"}
    workshop.change_base_config(
        lambda config: config["quantization_config"]["extra_config"].update({ATTENTION: sixteen})
    )
    workshop.build(drafter_int4=[ATTENTION])
    quantization = workshop.quantization()
    assert quantization["block_name_to_quantize"] == "model.language_model.layers,mtp.layers"
    assert ATTENTION not in quantization["extra_config"]
    assert quantization["extra_config"][f"{EXPERT}.0.up_proj"] == sixteen


@pytest.mark.parametrize(
    ("pattern", "rejected"),
    [
        (".*mtp.*", True),
        (r"mtp\..*\.experts\..*", True),
        (".*shared_expert.*", False),
        ("(", False),
    ],
)
def test_rejects_regular_expressions_that_keep_rounded_drafter_modules_in_16_bits(
    workshop, pattern, rejected
):
    sixteen = {"bits": 16, "data_type": "float"}
    workshop.change_base_config(
        lambda config: config["quantization_config"]["extra_config"].update({pattern: sixteen})
    )
    if rejected:
        message = refused(workshop, **CHOICES)
        assert f"extra_config.{pattern} keeps" in message
        assert "set engine.drafter: keep" in message
    else:
        workshop.build(**CHOICES)


def set_weight(values):
    return lambda mtp: mtp.update({f"{ATTENTION}.weight": bf16_tensor(values)})


def with_nan():
    values = np.full((HIDDEN, HIDDEN), 0.01, np.float32)
    values[3, 5] = np.nan
    return values


def with_outliers():
    values = np.full((HIDDEN, HIDDEN), 0.05, np.float32)
    values[:, ::128] = 1
    return values


WRONG_WEIGHTS = {
    "NaN": (set_weight(with_nan()), "NaN or infinite"),
    "outliers": (set_weight(with_outliers()), "limit 25%"),
    "odd inputs": (set_weight(np.ones((HIDDEN, 192), np.float32)), "a multiple of the group"),
    "odd outputs": (set_weight(np.ones((12, HIDDEN), np.float32)), "a multiple of 8"),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_rejects_weights_that_int4_cannot_represent(workshop, case):
    change, problem = WRONG_WEIGHTS[case]
    change(workshop.mtp)
    message = refused(workshop, **CHOICES)
    assert ATTENTION in message
    assert problem in message


def test_rejects_modules_outside_drafter(workshop):
    message = refused(workshop, drafter_int4=[*PATTERNS, f"{EXPERT}.9.up_proj"])
    assert f"{EXPERT}.9.up_proj.weight" in message
