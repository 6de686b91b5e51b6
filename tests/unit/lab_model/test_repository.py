"""Names, files and sizes of the two repositories resemble the originals."""

import json

from tests.unit.lab_model.reading import read_tree

L, GDN, ATTENTION, E, VISION = 4, 3, 1, 8, 2 * 12 + 9


def outside_experts(names):
    return {name for name in names if ".mlp.experts." not in name}


def test_int4_tensors_match_published_counts(int4):
    tree = read_tree(int4)
    main = [name for name in tree if not name.startswith("mtp.")]
    assert len(main) == L * E * 9 + GDN * 19 + ATTENTION * 14 + L * 7 + VISION + 3
    assert len(tree) - len(main) == 3 * E + 17


def test_fp8_tensors_match_published_counts(fp8):
    tree = read_tree(fp8)
    rest = outside_experts(tree)
    assert len(rest) == GDN * 12 + ATTENTION * 10 + L * 10 + VISION + 3 + 24
    assert len(tree) - len(rest) == (L + 1) * E * 6


def test_unmatched_donor_tensors_match_the_real_pair(int4, fp8):
    base = {
        name
        for name, tensor in read_tree(int4).items()
        if tensor["file"] != "model_extra_tensors.safetensors"
    }
    swapped = {
        f"model.language_model.layers.{layer}.mlp.shared_expert.{part}_proj.{suffix}"
        for layer in range(L)
        for part in ("gate", "up", "down")
        for suffix in ("weight", "weight_scale_inv")
    }
    unmatched = outside_experts(read_tree(fp8)) - base - swapped
    assert len(unmatched) == GDN * 8 + ATTENTION * 8 + 24


def test_mtp_is_bf16_in_separate_file(int4):
    tree = read_tree(int4)
    files = {tensor["file"] for name, tensor in tree.items() if name.startswith("mtp.")}
    assert files == {"model_extra_tensors.safetensors"}
    assert {t["dtype"] for n, t in tree.items() if n.startswith("mtp.")} == {"BF16"}


def test_index_matches_files(int4, fp8):
    for directory in (int4, fp8):
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        stored = {path.name for path in directory.glob("*.safetensors")}
        assert set(index["weight_map"].values()) == stored
        tree = read_tree(directory)
        assert set(tree) == set(index["weight_map"])
        assert index["metadata"]["total_size"] == sum(len(t["data"]) for t in tree.values())
        assert all(index["weight_map"][name] == t["file"] for name, t in tree.items())


def test_config_lists_16_bit_modules(int4):
    config = json.loads((int4 / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["group_size"]) == ("auto-round", 4, 128)
    tree = read_tree(int4)
    assert len(config["extra_config"]) == L * 4
    for module in config["extra_config"]:
        assert tree[f"{module}.weight"]["dtype"] == "BF16"


def test_donor_config_lists_16_bit_linears(fp8):
    config = json.loads((fp8 / "config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == [128, 128]
    tree = read_tree(fp8)
    converted = {n.removesuffix(".weight_scale_inv") for n in tree if n.endswith("_scale_inv")}
    assert all(tree[f"{module}.weight"]["dtype"] == "F8_E4M3" for module in converted)
    assert converted.isdisjoint(config["modules_to_not_convert"])
    wide = {
        n.removesuffix(".weight")
        for n, t in tree.items()
        if n.endswith(".weight") and len(t["shape"]) > 1
    }
    assert wide - converted == set(config["modules_to_not_convert"])
