"""Names, files and sizes of the lab's two repositories resemble the originals."""

import json
from pathlib import Path

import pytest

from lab.model import build
from tests.unit.lab_model.reading import read_tree

pytestmark = pytest.mark.slow  # builds two repositories
LAYERS, DELTA_NETS, ATTENTION, EXPERTS, VISION = 4, 3, 1, 8, 2 * 12 + 9


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    hub = tmp_path_factory.mktemp("hub")
    build.build(hub, trained=False)
    repositories = {name: hub / f"lab/tiny-{name}" for name in ("int4", "fp8")}
    return {
        name: folder / (folder / "refs/main").read_text().strip()
        for name, folder in repositories.items()
    }


@pytest.fixture(scope="module")
def int4(folders):
    return read_tree(folders["int4"])


@pytest.fixture(scope="module")
def fp8(folders):
    return read_tree(folders["fp8"])


def outside_experts(names):
    return {name for name in names if ".mlp.experts." not in name}


def test_tensors_match_published_counts(int4, fp8):
    mtp = {name for name in int4 if name.startswith("mtp.")}
    assert len(mtp) == 3 * EXPERTS + 17
    main = LAYERS * EXPERTS * 9 + DELTA_NETS * 19 + ATTENTION * 14 + LAYERS * 7 + VISION + 3
    assert len(int4) - len(mtp) == main
    rest = outside_experts(fp8)
    assert len(rest) == DELTA_NETS * 12 + ATTENTION * 10 + LAYERS * 10 + VISION + 3 + 24
    assert len(fp8) - len(rest) == (LAYERS + 1) * EXPERTS * 6


def test_unmatched_tensors_of_the_fp8_source_match_the_real_pair(int4, fp8):
    base = {name for name in int4 if not name.startswith("mtp.")}
    swapped = {
        f"model.language_model.layers.{layer}.mlp.shared_expert.{part}_proj.{suffix}"
        for layer in range(LAYERS)
        for part in ("gate", "up", "down")
        for suffix in ("weight", "weight_scale_inv")
    }
    unmatched = outside_experts(fp8) - base - swapped
    assert len(unmatched) == DELTA_NETS * 8 + ATTENTION * 8 + 24


def test_mtp_tensors_are_16_bit_in_a_separate_file(int4):
    mtp = [tensor for name, tensor in int4.items() if name.startswith("mtp.")]
    assert {tensor["file"] for tensor in mtp} == {"model_extra_tensors.safetensors"}
    assert {tensor["dtype"] for tensor in mtp} == {"BF16"}


@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_index_matches_files(folders, name):
    folder = folders[name]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tree = read_tree(folder)
    assert index["weight_map"] == {name: tensor["file"] for name, tensor in tree.items()}
    assert set(index["weight_map"].values()) == {p.name for p in folder.glob("*.safetensors")}
    assert index["metadata"]["total_size"] == sum(len(t["data"]) for t in tree.values())


def test_configurations_list_16_bit_modules(folders, int4, fp8):
    def quantization(name):
        return json.loads((folders[name] / "config.json").read_text())["quantization_config"]

    config = quantization("int4")
    assert (config["quant_method"], config["bits"], config["group_size"]) == ("auto-round", 4, 128)
    assert len(config["extra_config"]) == LAYERS * 4
    assert {int4[f"{module}.weight"]["dtype"] for module in config["extra_config"]} == {"BF16"}

    config = quantization("fp8")
    assert config["weight_block_size"] == [128, 128]
    converted = {n.removesuffix(".weight_scale_inv") for n in fp8 if n.endswith("_scale_inv")}
    assert {fp8[f"{module}.weight"]["dtype"] for module in converted} == {"F8_E4M3"}
    wide = {
        name.removesuffix(".weight")
        for name, tensor in fp8.items()
        if name.endswith(".weight") and len(tensor["shape"]) > 1
    }
    assert wide - converted == set(config["modules_to_not_convert"])
