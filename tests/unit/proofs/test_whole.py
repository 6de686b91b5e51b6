"""The full-size checkpoints: names of the catalog, accepted by the builder."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
from spark_contract.builder_api import expand_all

from lab.model import original
from proofs.releases.planning import slice_model
from proofs.trees import build
from proofs.whole import trees
from proofs.whole.cases import to_options
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.plan.memory import weight_sizes

SMALL = replace(
    trees.shape_of(asdict(read_catalog().model("qwen3.5-35b").architecture)),
    **{"layers": 4, "hidden": 256, "vocabulary": 1024, "experts": 4, "expert_width": 256},
    **{"shared_width": 256, "vision_depth": 1, "vision_hidden": 64, "vision_width": 128},
)
ARGUMENTS = [
    *("/model", "--served-model-name", "m", "--max-model-len", "4096"),
    *("--no-enable-prefix-caching", "--language-model-only", "--load-format", "auto"),
    *("--speculative-config", '{"method":"mtp"}', "--uds", "/run/engine.sock"),
]


@pytest.mark.parametrize("name", ["qwen3.5-35b", "qwen3.5-122b"])
def test_full_size_tree_has_the_tensors_and_bytes_of_the_catalog(name):
    model = read_catalog().model(name)
    shape = trees.shape_of(asdict(model.architecture))
    sizes = {**original.main_shapes(shape), **original.mtp_shapes(shape)}
    int4_mtp = model.architecture.mtp_scheme == "int4"
    entries = [entry for item in sizes.items() for entry in trees.stored(*item, int4_mtp)]
    tensors = model.tensors
    assert {entry[0] for entry in entries} == expand_all([*tensors.base, *tensors.mtp])
    planned = weight_sizes(model.architecture).tree_bytes
    assert trees.size_of(entries) == pytest.approx(planned, rel=0.01)


def test_slice_of_the_122b_has_the_tensors_of_its_first_layers():
    tensors = slice_model()["tensors"]
    whole = expand_all(read_catalog().model("qwen3.5-122b").tensors.base)
    later = re.compile(r"model\.language_model\.layers\.([89]|\d\d)\.")
    assert expand_all(tensors["base"]) == {name for name in whole if not later.match(name)}


def test_builder_accepts_random_sources(tmp_path):
    base, donor, out = (tmp_path / name for name in ("base", "donor", "out"))
    with ThreadPoolExecutor(2) as pool:
        trees.write_sources(base, donor, SMALL, {"donor_unmatched": ["mtp.fc.weight"]}, True, pool)
    build.build(build.plan(base, donor, out, build.VARIANTS["overlay-head8"]), tmp_path)
    new = build.names_of(out) - build.names_of(base)
    assert len(new) == SMALL.layers * 3 * 2 + 3


def test_arguments_of_the_server_are_left_out():
    assert to_options(ARGUMENTS) == {
        "max_model_len": 4096,
        "enable_prefix_caching": False,
        "language_model_only": True,
        "load_format": "auto",
        "speculative_config": {"method": "mtp"},
    }
