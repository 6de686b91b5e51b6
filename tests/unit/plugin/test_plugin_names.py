"""Names of modules and tensors: fusion, renames of an overlay, width of experts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spark_vllm.checkpoint import names

MODULES = [
    f"model.language_model.layers.{layer}.mlp.shared_expert.{part}_proj"
    for layer in range(48)
    for part in ("gate", "up", "down")
]


def test_144_shards_form_96_modules() -> None:
    assert len(MODULES) == 144
    fused = names.fused_modules(MODULES, names.FUSED)
    assert len(fused) == 96
    assert fused[:2] == [
        "model.language_model.layers.0.mlp.shared_expert.gate_up_proj",
        "model.language_model.layers.0.mlp.shared_expert.down_proj",
    ]


@pytest.mark.parametrize(
    "module",
    [
        "model.language_model.layers.1.mlp.shared_expert.gate_up_proj",
        "model.language_model.layers.47.mlp.shared_expert.down_proj",
    ],
)
def test_listed_module_is_dispatched(module: str) -> None:
    assert names.are_all_shards_listed(module, MODULES, names.FUSED)


@pytest.mark.parametrize(
    "module",
    [
        "model.language_model.layers.1.mlp.shared_expert_gate",
        "model.language_model.layers.1.mlp.experts.gate_up_proj",
        "model.language_model.layers.48.mlp.shared_expert.down_proj",
        "mtp.layers.0.mlp.shared_expert.gate_up_proj",
        "mtp.layers.0.mlp.shared_expert.down_proj",
        "model.language_model.layers.1.mlp.shared_expert.down_proj.inner",
        "lm_head",
    ],
)
def test_similar_name_is_not_dispatched(module: str) -> None:
    assert not names.are_all_shards_listed(module, MODULES, names.FUSED)


def test_half_a_fused_module_is_rejected() -> None:
    modules = [name for name in MODULES if not name.endswith("layers.3.mlp.shared_expert.up_proj")]
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.shared_expert\.gate_up_proj.*only"):
        names.fused_modules(modules, names.FUSED)


def plain(name: str, *, head_int8: bool = True) -> str | None:
    return names.rename(name, names.overlay_rules(MODULES, head_int8))


def test_overlay_names_become_plain_ones() -> None:
    module = MODULES[7]
    assert plain(f"{module}.weight_fp8") == f"{module}.weight"
    assert plain(f"{module}.weight_scale_inv_fp8") == f"{module}.weight_scale_inv"
    assert plain(f"{module}.weight") is None
    assert [plain(f"lm_head.{part}_int8") for part in names.HEAD_PARTS] == [
        "lm_head.qweight",
        "lm_head.scales",
        "lm_head.qzeros",
    ]
    assert plain("lm_head.weight") is None
    assert plain("lm_head.weight", head_int8=False) == "lm_head.weight"


def test_every_module_has_rules() -> None:
    rules = names.overlay_rules(MODULES, head_int8=False)
    for module in MODULES:
        assert names.rename(f"{module}.weight_fp8", rules) == f"{module}.weight"
        assert names.rename(f"{module}.weight", rules) is None


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.mlp.shared_expert.gate_proj.weight",
        "model.language_model.layers.1.mlp.shared_expert_gate.weight",
        "model.language_model.layers.48.mlp.shared_expert.gate_proj.weight",
        "model.language_model.layers.1.mlp.experts.0.gate_proj.qweight",
        "model.language_model.layers.1.mlp.shared_expert.gate_proj.bias",
        # As seen by nested loaders of the engine:
        "language_model.model.layers.1.mlp.shared_expert.gate_proj.weight",
        "model.layers.1.mlp.shared_expert.gate_proj.weight",
        "layers.1.mlp.shared_expert.gate_proj.weight",
    ],
)
def test_other_tensors_keep_their_names(name: str) -> None:
    assert plain(name) == name


def test_overlay_rejects_modules_outside_the_text_layers() -> None:
    with pytest.raises(ValueError, match="layout 'full'"):
        names.overlay_rules(["mtp.layers.0.mlp.shared_expert.down_proj"], head_int8=False)


PARTS = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "linear_attn.out_proj")


@given(st.sets(st.tuples(st.integers(0, 60), st.sampled_from(PARTS)), min_size=1))
def test_rules_match_exactly_the_listed_modules(chosen: set[tuple[int, str]]) -> None:
    modules = [f"{names.TEXT_LAYERS}{layer}.{part}" for layer, part in chosen]
    rules = names.overlay_rules(modules, head_int8=False)
    for layer in range(62):
        for part in PARTS:
            name = f"{names.TEXT_LAYERS}{layer}.{part}.weight"
            dropped = names.rename(name, rules) is None
            assert dropped == ((layer, part) in chosen)


EXPERTS_MODULE = "language_model.model.layers.0.mlp.experts"


@pytest.mark.parametrize("width", [256, 512, 1024])
def test_experts_of_several_groups_are_accepted(width: int) -> None:
    names.check_expert_width(EXPERTS_MODULE, width, 128)


@pytest.mark.parametrize("width", [64, 128])
def test_experts_of_a_single_group_are_rejected(width: int) -> None:
    with pytest.raises(ValueError, match=f"{EXPERTS_MODULE}: experts are {width} wide.*fix: lower"):
        names.check_expert_width(EXPERTS_MODULE, width, 128)
