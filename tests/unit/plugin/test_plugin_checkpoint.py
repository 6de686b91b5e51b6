"""Checks before loading: intact checkpoints pass, damage is rejected by tensor name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plugin_hybrids import INDEX, OVERLAY_FILE, Hybrid, Raw, raw_bf16, read_file, write_file
from plugin_sources import EXPERTS, LAYERS, write_sources
from spark_vllm.checkpoint.gate import check_checkpoint, list_mtp_modules
from spark_vllm.checkpoint.settings import read_settings

TEXT = "model.language_model.layers."
GATE = f"{TEXT}1.mlp.shared_expert.gate_proj"
EXPERT = f"{TEXT}0.mlp.experts.1.up_proj"

LAYOUTS = [
    pytest.param(layout, head, id=f"{layout}-{head}")
    for layout in ("overlay", "full")
    for head in ("keep", "int8-g128")
]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(*write_sources(tmp_path_factory.mktemp("sources")))


class Damaged:
    """A written checkpoint that can be damaged."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index: dict[str, str] = json.loads((root / INDEX).read_text())["weight_map"]

    def tensors(self, file: str, change: Callable[[dict[str, Raw]], object]) -> None:
        tensors = read_file(self.root / file)
        change(tensors)
        write_file(self.root / file, tensors)

    def remove(self, *names: str) -> None:
        """Remove tensors from their file and from the index: a builder that forgot them."""
        for name in names:
            self.tensors(self.index.pop(name), lambda tensors, name=name: tensors.pop(name))
        self.write_index()

    def retype(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        sizes = {"BF16": 2, "F8_E4M3": 1, "I32": 4}
        count = sizes[dtype]
        for size in shape:
            count *= size
        raw = (dtype, shape, bytes(count))
        self.tensors(self.index[name], lambda tensors: tensors.update({name: raw}))

    def write_index(self) -> None:
        (self.root / INDEX).write_text(json.dumps({"weight_map": self.index}))

    def config(self, change: Callable[[dict[str, Any]], object]) -> None:
        path = self.root / "config.json"
        config = json.loads(path.read_text())
        change(config["quantization_config"])
        path.write_text(json.dumps(config))


def check(root: Path, mtp_layers: int = 1, layers: int = LAYERS) -> None:
    config = json.loads((root / "config.json").read_text())["quantization_config"]
    check_checkpoint(
        str(root), read_settings(config), layers=layers, mtp_layers=mtp_layers, experts=EXPERTS
    )


@pytest.mark.parametrize(("layout", "head"), LAYOUTS)
def test_intact_checkpoint_passes(hybrid: Hybrid, tmp_path: Path, layout: str, head: str) -> None:
    check(hybrid.write(tmp_path / "tree", layout=layout, head=head))


def fp8(layout: str, part: str) -> str:
    return f"{GATE}.{part}" + ("_fp8" if layout == "overlay" else "")


DAMAGES: dict[str, tuple[Callable[[Damaged, str], object], str]] = {
    "a block scale of a fused module missing": (
        lambda tree, layout: tree.remove(fp8(layout, "weight_scale_inv")),
        r"no .*layers\.1\.mlp\.shared_expert\.gate_proj\.weight_scale_inv",
    ),
    "an FP8 weight missing": (
        lambda tree, layout: tree.remove(fp8(layout, "weight")),
        r"no .*layers\.1\.mlp\.shared_expert\.gate_proj\.weight",
    ),
    "an FP8 weight still in 16 bits": (
        lambda tree, layout: tree.retype(fp8(layout, "weight"), "BF16", (384, 256)),
        r"gate_proj\.weight\w* is BF16, not F8_E4M3",
    ),
    "block scales of the wrong shape": (
        lambda tree, layout: tree.retype(fp8(layout, "weight_scale_inv"), "BF16", (2, 3)),
        r"shape \[2, 3\], the weight \[384, 256\] needs \[3, 2\]",
    ),
    "the drafter's file missing": (
        lambda tree, _: (tree.root / "model_extra_tensors.safetensors").unlink(),
        r"model_extra_tensors\.safetensors: unreadable",
    ),
    "the drafter's file not in the index": (
        lambda tree, _: (
            [tree.index.pop(name) for name in list(tree.index) if name.startswith("mtp.")],
            tree.write_index(),
        ),
        rf"{INDEX}: no mtp\.fc\.weight.*and \d+ more",
    ),
    "two drafter tensors missing": (
        lambda tree, _: tree.remove("mtp.fc.weight", "mtp.layers.0.mlp.experts.1.up_proj.weight"),
        r"no mtp\.fc\.weight; .*no mtp\.layers\.0\.mlp\.experts\.1\.up_proj\.weight",
    ),
    "scales of an expert missing": (
        lambda tree, _: tree.remove(f"{EXPERT}.scales"),
        r"no .*experts\.1\.up_proj\.scales",
    ),
    "packed weight of an expert missing": (
        lambda tree, _: tree.remove(f"{EXPERT}.qweight"),
        r"experts\.1\.up_proj: scales without qweight",
    ),
    "an expert packed with another width": (
        lambda tree, _: tree.retype(f"{EXPERT}.qweight", "I32", (64, 256)),
        r"qweight \[64, 256\] is no 4-bit weight",
    ),
    "a name in two files": (
        lambda tree, _: tree.tensors(
            "model_extra_tensors.safetensors",
            lambda tensors: tensors.update({f"{EXPERT}.scales": ("F16", (2, 256), bytes(1024))}),
        ),
        r"model_extra_tensors\.safetensors: duplicate .*up_proj\.scales",
    ),
    "a tensor the index does not list": (
        lambda tree, _: tree.tensors(
            "model_extra_tensors.safetensors",
            lambda tensors: tensors.update({"mtp.stray.weight": ("BF16", (2,), bytes(4))}),
        ),
        r"mtp\.stray\.weight is not in model\.safetensors\.index\.json",
    ),
    "a file cut short": (
        lambda tree, _: (tree.root / OVERLAY_FILE).write_bytes(
            (tree.root / OVERLAY_FILE).read_bytes()[:-16]
        ),
        rf"{OVERLAY_FILE}: unreadable \(\d+ bytes, the header requires \d+\)",
    ),
    "blocks to quantise do not cover the packed modules": (
        lambda tree, _: tree.config(lambda c: c.update(block_name_to_quantize="model.visual")),
        r"packed, but 16-bit according to config",
    ),
    "blocks to quantise cover a 16-bit drafter": (
        lambda tree, _: tree.config(
            lambda c: c.update(block_name_to_quantize=f"{TEXT[:-1]},mtp.layers")
        ),
        r"mtp\.layers\.0\.self_attn\.q_proj: 16-bit, but block_name_to_quantize",
    ),
    "no blocks to quantise": (
        lambda tree, _: tree.config(lambda c: c.pop("block_name_to_quantize")),
        r"block_name_to_quantize: 'missing'",
    ),
    "half of a fused module listed": (
        lambda tree, _: tree.config(lambda c: c["fp8_block"]["modules"].remove(GATE)),
        r"gate_up_proj.*only .*up_proj is listed",
    ),
    "another block shape": (
        lambda tree, _: tree.config(lambda c: c["fp8_block"].update(block_shape=[64, 64])),
        r"fp8_block\.block_shape",
    ),
    "asymmetric weights": (
        lambda tree, _: tree.config(lambda c: c.update(sym=False)),
        r"quantization_config\.sym: False",
    ),
    "an asymmetric module": (
        lambda tree, _: tree.config(
            lambda c: c["extra_config"].update({EXPERT: {"bits": 4, "sym": False}})
        ),
        rf"extra_config\.{EXPERT}: .*sym true",
    ),
    "another group size for a single module": (
        lambda tree, _: tree.config(
            lambda c: c["extra_config"].update({EXPERT: {"bits": 4, "group_size": 64}})
        ),
        rf"extra_config\.{EXPERT}: .*group_size 128",
    ),
    "8-bit floats for a single module": (
        lambda tree, _: tree.config(
            lambda c: c["extra_config"].update({EXPERT: {"bits": 8, "data_type": "fp"}})
        ),
        rf"extra_config\.{EXPERT}: .*data_type int",
    ),
    "an invalid pattern": (
        lambda tree, _: tree.config(lambda c: c["extra_config"].update({"mtp.(": {"bits": 16}})),
        r"extra_config\.mtp\.\(: .*a name or a pattern",
    ),
    "an unknown layout": (
        lambda tree, _: tree.config(lambda c: c["spark"].update(layout="both")),
        r"spark\.layout: 'both', accepted: overlay or full",
    ),
    "an INT8 head without a config entry": (
        lambda tree, _: tree.config(lambda c: c["extra_config"].pop("lm_head")),
        r"extra_config\.lm_head is \{\}",
    ),
    "an INT8 head and the old head": (
        lambda tree, _: (
            tree.index.update({"lm_head.weight": "model-00002-of-00002.safetensors"}),
            tree.write_index(),
        ),
        r"(lists lm_head\.weight in addition|no tensor lm_head\.weight)",
    ),
}


SCALES: dict[str, tuple[float, str]] = {
    "a negative block scale": (-11904.0, r"gate_proj\.weight_scale_inv\w*: .*such as -11904"),
    "a block scale of zero": (0.0, r"not above zero, such as 0\b"),
    "a block scale that is no number": (float("nan"), r".*such as nan"),
    "a block scale far outside": (300.0, r"scale 300 is over 1000 times the median"),
}


def with_scale(raw: Raw, value: float) -> Raw:
    dtype, shape, data = raw
    bits = raw_bf16(np.array([value], np.float32))[2]
    assert dtype == "BF16"
    return dtype, shape, data[:2] + bits + data[4:]  # the second block


@pytest.mark.parametrize("layout", ["overlay", "full"])
@pytest.mark.parametrize("damage", SCALES)
def test_implausible_scale_is_rejected(
    hybrid: Hybrid, tmp_path: Path, layout: str, damage: str
) -> None:
    value, message = SCALES[damage]
    tree = Damaged(hybrid.write(tmp_path / "tree", layout=layout))
    name = fp8(layout, "weight_scale_inv")
    tree.tensors(
        tree.index[name], lambda tensors: tensors.update({name: with_scale(tensors[name], value)})
    )
    with pytest.raises(ValueError, match=message):
        check(tree.root)


def test_block_of_zeros_may_have_any_positive_scale(hybrid: Hybrid, tmp_path: Path) -> None:
    tree = Damaged(hybrid.write(tmp_path / "tree", layout="full"))
    weight, scale = fp8("full", "weight"), fp8("full", "weight_scale_inv")

    def dead(tensors: dict[str, Raw]) -> None:
        dtype, shape, data = tensors[weight]
        codes = np.frombuffer(data, np.uint8).reshape(shape).copy()
        codes[:128, 128:256] = 0
        tensors[weight] = dtype, shape, codes.tobytes()
        tensors[scale] = with_scale(tensors[scale], 300.0)

    tree.tensors(tree.index[scale], dead)
    check(tree.root)


def test_symmetric_int4_scales_may_be_negative(hybrid: Hybrid, tmp_path: Path) -> None:
    """AutoRound gives a group the sign of the largest weight."""
    tree = Damaged(hybrid.write(tmp_path / "tree", layout="overlay"))
    name = f"{EXPERT}.scales"

    def turn(tensors: dict[str, Raw]) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = dtype, shape, (-np.frombuffer(data, np.float16)).tobytes()

    tree.tensors(tree.index[name], turn)
    check(tree.root)


@pytest.mark.parametrize("layout", ["overlay", "full"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_rejected_by_tensor_name(
    hybrid: Hybrid, tmp_path: Path, layout: str, damage: str
) -> None:
    inflict, message = DAMAGES[damage]
    tree = Damaged(hybrid.write(tmp_path / "tree", layout=layout, head="int8-g128"))
    inflict(tree, layout)
    with pytest.raises(ValueError, match=message):
        check(tree.root)


def test_overlay_listing_a_module_twice_is_rejected(hybrid: Hybrid, tmp_path: Path) -> None:
    tree = Damaged(hybrid.write(tmp_path / "tree", layout="overlay"))
    tree.index[f"{GATE}.weight"] = "model-00002-of-00002.safetensors"
    tree.write_index()
    with pytest.raises(ValueError, match=r"lists .*gate_proj\.weight in addition"):
        check(tree.root)


def test_missing_head_is_rejected(hybrid: Hybrid, tmp_path: Path) -> None:
    tree = Damaged(hybrid.write(tmp_path / "tree", layout="overlay"))
    tree.remove("lm_head.weight")
    with pytest.raises(ValueError, match=r"no lm_head\.weight"):
        check(tree.root)


def test_packed_drafter_needs_a_matching_config(hybrid: Hybrid, tmp_path: Path) -> None:
    """As in the 35B repository: experts and attention of the drafter in INT4, the rest 16-bit."""
    tree = Damaged(hybrid.write(tmp_path / "tree", layout="overlay"))
    source = read_file(tree.root / tree.index[f"{EXPERT}.qweight"])
    packed = [f"experts.{n}.{part}_proj" for n in range(EXPERTS) for part in ("gate", "up", "down")]
    for inner in packed:
        module = f"mtp.layers.0.mlp.{inner}"
        tree.remove(f"{module}.weight")
        new = {
            f"{module}.{part}": source[f"{EXPERT}.{part}"]
            for part in ("qweight", "scales", "qzeros")
        }
        tree.tensors(
            "model_extra_tensors.safetensors", lambda tensors, new=new: tensors.update(new)
        )
        tree.index.update(dict.fromkeys(new, "model_extra_tensors.safetensors"))
    tree.write_index()
    with pytest.raises(ValueError, match="16-bit according to config"):
        check(tree.root)
    sixteen = {"bits": 16, "data_type": "float"}
    tree.config(lambda c: c.update(block_name_to_quantize=f"{TEXT[:-1]},mtp.layers"))
    tree.config(
        lambda c: c["extra_config"].update({r".*mtp\..*(shared_expert|self_attn).*": sixteen})
    )
    check(tree.root)


def test_drafter_tensors_are_optional_without_a_drafter(hybrid: Hybrid, tmp_path: Path) -> None:
    tree = Damaged(hybrid.write(tmp_path / "tree", layout="full"))
    tree.remove(*[name for name in tree.index if name.startswith("mtp.")])
    check(tree.root, mtp_layers=0)
    with pytest.raises(ValueError, match=r"no mtp\.fc\.weight"):
        check(tree.root)


def test_layer_without_tensors_is_rejected(hybrid: Hybrid, tmp_path: Path) -> None:
    tree = Damaged(hybrid.write(tmp_path / "tree", layout="full"))
    last = re.escape(f"{TEXT}{LAYERS}.")
    with pytest.raises(ValueError, match=rf"{re.escape(INDEX)}: no tensor below {last}; fix: "):
        check(tree.root, layers=LAYERS + 1)


def test_drafter_of_the_122b_has_785_tensors() -> None:
    assert len(list_mtp_modules(1, 256)) == 785


def test_repository_name_is_rejected() -> None:
    with pytest.raises(ValueError, match="not a directory"):
        check_checkpoint("org/name", None, layers=0, mtp_layers=0, experts=0)  # type: ignore[arg-type]
