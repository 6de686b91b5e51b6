"""Missing tensors of the target, with which the engine would compute random results."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from plugin_hybrids import Hybrid
from plugin_sources import EXPERTS, LAYERS, write_sources
from spark_contract.orders import expand_all
from spark_vllm.checkpoint.gate import find_missing_modules
from test_plugin_checkpoint import LAYOUTS, TEXT, Damaged, check

from spark_deploy.config.catalog.model import HybridModel
from tests.unit.planning.plans import shipped_catalog

CATALOG = shipped_catalog()
# Gaps are detected by comparison with another layer of the same kind.
HYBRIDS = {n: model for n, model in CATALOG.models.items() if isinstance(model, HybridModel)}
LAYERED = [n for n, model in HYBRIDS.items() if model.architecture.attention_layers > 1]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(*write_sources(tmp_path_factory.mktemp("sources")))


@pytest.mark.parametrize(("layout", "head"), LAYOUTS)
@pytest.mark.parametrize(
    ("module", "parts"),
    [
        ("0.mlp.experts.1.down_proj", ("qweight", "scales", "qzeros")),
        ("1.input_layernorm", ("weight",)),
        ("1.mlp.gate", ("weight",)),
    ],
)
def test_missing_module_is_named(
    hybrid: Hybrid, tmp_path: Path, layout: str, head: str, module: str, parts: tuple[str, ...]
) -> None:
    tree = Damaged(hybrid.write(tmp_path / "tree", layout=layout, head=head))
    tree.remove(*(f"{TEXT}{module}.{part}" for part in parts))
    with pytest.raises(ValueError, match=f"no {TEXT}{module}"):
        check(tree.root)


def test_missing_layer_is_named(hybrid: Hybrid, tmp_path: Path) -> None:
    tree = Damaged(hybrid.write(tmp_path / "tree", layout="full"))
    last = f"{TEXT}{LAYERS - 1}."
    tree.config(
        lambda config: config["fp8_block"].update(
            modules=[m for m in config["fp8_block"]["modules"] if not m.startswith(last)]
        )
    )
    tree.remove(*[name for name in tree.index if name.startswith(last)])
    with pytest.raises(ValueError, match=f"no tensor below {last}"):
        check(tree.root)


@pytest.mark.parametrize("name", ["model.language_model.norm", "model.language_model.embed_tokens"])
def test_missing_tensor_outside_layers_is_named(hybrid: Hybrid, tmp_path: Path, name: str) -> None:
    tree = Damaged(hybrid.write(tmp_path / "tree", layout="overlay"))
    tree.remove(f"{name}.weight")
    with pytest.raises(ValueError, match=f"no {name}"):
        check(tree.root)


@pytest.mark.parametrize("model", LAYERED)
def test_real_models_are_complete_and_each_gap_is_found(model: str) -> None:
    loaded = CATALOG.model(model)
    names = set(expand_all(loaded.tensors.base))
    shape = loaded.architecture
    before = time.monotonic()
    assert list(find_missing_modules(names, shape.layers, shape.experts)) == []
    assert time.monotonic() - before < 10
    gaps = [
        f"{TEXT}3.self_attn.q_norm",
        f"{TEXT}4.linear_attn.A_log",
        f"{TEXT}4.linear_attn.conv1d",
        f"{TEXT}{shape.layers - 1}.mlp.experts.{shape.experts - 1}.gate_proj",
    ]
    ends = ("", ".weight", ".qweight", ".qzeros", ".scales")
    gone = {f"{gap}{end}" for gap in gaps for end in ends} & names
    assert all(any(name.startswith(gap) for name in gone) for gap in gaps)
    assert list(find_missing_modules(names - gone, shape.layers, shape.experts)) == gaps


def test_layer_of_another_kind_or_format_is_no_gap() -> None:
    names = {"model.language_model.norm.weight", "model.language_model.embed_tokens.weight"}
    for layer, attention in enumerate(
        ("linear_attn.in_proj", "self_attn.q_proj", "self_attn.q_proj")
    ):
        part = "qweight" if layer == 1 else "weight"  # another layer left at 16 bits
        names.add(f"{TEXT}{layer}.{attention}.{part}")
    assert list(find_missing_modules(names, 3, 0)) == []
    assert list(find_missing_modules(names, 4, 0)) == [f"{TEXT}3."]


def test_fused_experts_are_accepted() -> None:
    names = {
        "model.language_model.norm.weight",
        "model.language_model.embed_tokens.weight",
        *(
            f"{TEXT}{layer}.mlp.experts.{part}"
            for layer in (0, 1)
            for part in ("gate_up_proj", "down_proj")
        ),
    }
    assert list(find_missing_modules(names, 2, EXPERTS)) == []
