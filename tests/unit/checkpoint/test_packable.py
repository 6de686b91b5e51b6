"""What AutoRound would leave in 16 bits is known by names and headers, before hours of work."""

from types import SimpleNamespace

import numpy as np
import pytest
from spark_checkpoint.directory import read_checkpoint
from spark_checkpoint.errors import GateRefused
from spark_checkpoint.requantize_checks import (
    check_kept_experts,
    check_packable,
    excluded_by_name,
    packed_modules,
)

from lab.model import original, repository, rounding, vocabulary
from lab.model.safetensors import write_file
from lab.model.shape import TINY
from spark_deploy.config.catalog.model import HybridModel
from tests.unit.planning.plans import shipped_catalog

EXPERTS = "mtp.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The 16-bit tree."""
    root = tmp_path_factory.mktemp("published") / "tree"
    repository.write_plain(
        root, TINY, original.random_weights(TINY, 3), vocabulary.train(TINY.vocabulary)
    )
    return read_checkpoint(root)


def asking_for(*names):
    """Return as much of a plan as says what is to be packed."""
    return SimpleNamespace(base_tensors=names, mtp_tensors=())


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("lm_head", "it is in no layer of the language model or of its drafter"),
        ("mtp.fc", "it is in no layer of the language model or of its drafter"),
        ("mtp.layers.0.mlp.gate", "it is a gate"),
        ("mtp.layers.0.self_attn.q_norm", "its shape [64] is not a matrix"),
        ("mtp.layers.0.mlp.experts.8.gate_proj", "the original has no such weight"),
        (
            "model.language_model.layers.0.linear_attn.in_proj_a",
            "its 8 rows are not a multiple of 32",
        ),
    ],
)
def test_what_autoround_would_leave_in_16_bits_is_refused(published, module, reason):
    with pytest.raises(GateRefused) as refused:
        check_packable(asking_for(f"{module}.{{qweight,qzeros,scales}}"), published)
    assert refused.value.where == module
    assert refused.value.what.endswith(f"AutoRound leaves it in 16 bits: {reason}")
    assert refused.value.fix == f"name {module}.weight in the model's tensors instead"


def fused(folder, seed=0):
    """Return a 16-bit tree that holds four experts of a drafter in two tensors, and its values."""
    widths = {"gate_up_proj": (4, 2 * 128, 256), "down_proj": (4, 256, 64)}
    source = np.random.default_rng(seed)
    values = {name: source.normal(size=size).astype("f4") for name, size in widths.items()}
    folder.mkdir()
    write_file(
        folder / "model.safetensors",
        {f"{EXPERTS}.{name}": rounding.bf16(one) for name, one in values.items()},
    )
    return read_checkpoint(folder), values


def split(folder, values, **other):
    """Return the tree that AutoRound makes of it, whose experts stay in 16 bits."""
    parts = {}
    for expert in range(4):
        gate, up = np.split(values["gate_up_proj"][expert], 2)
        parts |= {f"{expert}.gate_proj": gate, f"{expert}.up_proj": up}
        parts[f"{expert}.down_proj"] = values["down_proj"][expert]
    parts |= {name: parts[source] for name, source in other.items()}
    folder.mkdir()
    tensors = {f"{EXPERTS}.{name}.weight": rounding.bf16(one) for name, one in parts.items()}
    write_file(folder / "model.safetensors", tensors)
    return read_checkpoint(folder)


def test_experts_that_lie_in_one_tensor_of_their_layer_have_its_widths(tmp_path):
    original, _ = fused(tmp_path / "original")
    check_packable(asking_for(f"{EXPERTS}.{{0..3}}.{{gate,up}}_proj.qweight"), original)
    with pytest.raises(GateRefused, match="its 64 columns are not a multiple of 128"):
        check_packable(asking_for(f"{EXPERTS}.3.down_proj.qweight"), original)
    with pytest.raises(GateRefused, match="the original has no such weight"):
        check_packable(asking_for(f"{EXPERTS}.4.up_proj.qweight"), original)


def test_experts_that_stay_in_16_bits_are_the_parts_of_that_tensor(tmp_path):
    original, values = fused(tmp_path / "original")
    assert check_kept_experts(original, split(tmp_path / "result", values)) == 12


@pytest.mark.parametrize(
    ("name", "source"),
    [("2.up_proj", "2.gate_proj"), ("1.down_proj", "0.down_proj"), ("3.gate_proj", "0.gate_proj")],
)
def test_one_in_another_s_place_is_refused(tmp_path, name, source):
    original, values = fused(tmp_path / "original")
    result = split(tmp_path / "result", values, **{name: source})
    with pytest.raises(GateRefused, match="differs from the original"):
        check_kept_experts(original, result)


def test_no_model_that_names_its_16_bit_repository_asks_for_what_autoround_leaves():
    models = [one for one in shipped_catalog().models.values() if isinstance(one, HybridModel)]
    named = [one for one in models if one.sources.original]
    assert "qwen3.5-35b" in {one.name for one in named}
    for model in named:
        plan = asking_for(*model.tensors.base, *model.tensors.mtp)
        left = [module for module in packed_modules(plan) if excluded_by_name(module)]
        assert left == [], model.name
