import pytest
from hypothesis import given
from hypothesis import strategies as st
from spark_vllm.checkpoint import names

LAYERS = "model.language_model.layers"
MODULES = [
    f"{LAYERS}.{layer}.mlp.shared_expert.{part}_proj"
    for layer in range(48)
    for part in ("gate", "up", "down")
]


def test_fuses_144_shards_into_96_modules():
    assert len(MODULES) == 144
    fused = names.fused_modules(MODULES)
    assert len(fused) == 96
    prefix = f"{LAYERS}.0.mlp.shared_expert"
    assert {f"{prefix}.gate_up_proj", f"{prefix}.down_proj"} < fused


@pytest.mark.parametrize(
    ("module", "is_listed"),
    [
        (f"{LAYERS}.1.mlp.shared_expert.gate_up_proj", True),
        (f"{LAYERS}.47.mlp.shared_expert.down_proj", True),
        (f"{LAYERS}.1.mlp.shared_expert_gate", False),
        (f"{LAYERS}.1.mlp.experts.gate_up_proj", False),
        (f"{LAYERS}.48.mlp.shared_expert.down_proj", False),
        ("mtp.layers.0.mlp.shared_expert.gate_up_proj", False),
        ("mtp.layers.0.mlp.shared_expert.down_proj", False),
        (f"{LAYERS}.1.mlp.shared_expert.down_proj.inner", False),
        ("lm_head", False),
    ],
)
def test_recognizes_exactly_the_listed_modules(module, is_listed):
    assert names.are_all_shards_listed(module, MODULES, names.FUSED) is is_listed


def test_rejects_a_fused_module_with_only_some_shards_listed():
    modules = [name for name in MODULES if not name.endswith("layers.3.mlp.shared_expert.up_proj")]
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.shared_expert\.gate_up_proj"):
        names.fused_modules(modules)


HEAD_RULES = names.overlay_rules(MODULES, head_int8=True)


def test_renames_every_listed_module_and_the_head():
    for module in MODULES:
        assert names.rename(f"{module}.weight_fp8", HEAD_RULES) == f"{module}.weight"
        scale = names.rename(f"{module}.weight_scale_inv_fp8", HEAD_RULES)
        assert scale == f"{module}.weight_scale_inv"
        assert names.rename(f"{module}.weight", HEAD_RULES) is None
    for part in ("qweight", "scales", "qzeros"):
        assert names.rename(f"lm_head.{part}_int8", HEAD_RULES) == f"lm_head.{part}"
    assert names.rename("lm_head.weight", HEAD_RULES) is None
    keep = names.overlay_rules(MODULES, head_int8=False)
    assert names.rename("lm_head.weight", keep) == "lm_head.weight"


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.mlp.shared_expert.gate_proj.weight",
        f"{LAYERS}.1.mlp.shared_expert_gate.weight",
        f"{LAYERS}.48.mlp.shared_expert.gate_proj.weight",
        f"{LAYERS}.1.mlp.experts.0.gate_proj.qweight",
        f"{LAYERS}.1.mlp.shared_expert.gate_proj.bias",
        "language_model.model.layers.1.mlp.shared_expert.gate_proj.weight",
        "model.layers.1.mlp.shared_expert.gate_proj.weight",
        "layers.1.mlp.shared_expert.gate_proj.weight",
    ],
)
def test_keeps_the_names_of_other_tensors(name):
    assert names.rename(name, HEAD_RULES) == name


def test_rejects_an_overlay_with_modules_outside_the_text_layers():
    with pytest.raises(ValueError, match="layout 'full'"):
        names.overlay_rules(["mtp.layers.0.mlp.shared_expert.down_proj"], head_int8=False)


PARTS = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "linear_attn.out_proj")


@given(st.sets(st.tuples(st.integers(0, 60), st.sampled_from(PARTS)), min_size=1))
def test_overlay_rules_match_exactly_the_listed_modules(chosen):
    modules = [f"{names.TEXT_LAYERS}{layer}.{part}" for layer, part in chosen]
    rules = names.overlay_rules(modules, head_int8=False)
    for layer in range(62):
        for part in PARTS:
            name = f"{names.TEXT_LAYERS}{layer}.{part}.weight"
            assert (names.rename(name, rules) is None) == ((layer, part) in chosen)


@pytest.mark.parametrize(
    ("width", "accepted"), [(64, False), (128, False), (256, True), (512, True), (1024, True)]
)
def test_accepts_only_experts_with_several_scale_groups(width, accepted):
    module = "language_model.model.layers.0.mlp.experts"
    if accepted:
        names.check_expert_width(module, width, 128)
        return
    with pytest.raises(ValueError, match=f"{module}: experts are {width} wide.*fix: lower"):
        names.check_expert_width(module, width, 128)
