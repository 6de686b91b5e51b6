"""A catalog file whose patterns, counts and shapes do not fit each other is refused by name."""

import copy

import pytest
import yaml

from spark_deploy.config.catalog.model import HybridModel
from spark_deploy.config.catalog.tensor_sets import Tensors
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.documents import convert
from spark_deploy.config.schema_errors import dotted
from tests.unit.planning.plans import shipped_catalog

SHOWN = "catalog/models/qwen3.5-122b.yml"
HYBRIDS = [n for n, one in shipped_catalog().models.items() if isinstance(one, HybridModel)]


@pytest.fixture
def tensors():
    data = yaml.safe_load((CHECKOUT / SHOWN).read_text("utf-8"))
    return copy.deepcopy(data["tensors"])


def problems(tensors, donor="Org/Donor"):
    found = convert(Tensors, tensors).broken(donor=donor)
    return [f"tensors.{dotted(one.key)}: {one.what}; {one.fix}" for one in found]


def refused(tensors, donor="Org/Donor"):
    found = problems(tensors, donor)
    assert found
    return "\n".join(found)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_model_says_who_counted_its_names_if_anybody_and_where_its_shapes_are_from(name):
    data = yaml.safe_load((CHECKOUT / f"catalog/models/{name}.yml").read_text("utf-8"))
    if "based_on" in data:
        return
    counts = data["tensors"].get("counts")
    assert counts is None or len(counts["source"]) > 10
    assert all(len(shape["source"]) > 10 for shape in data["tensors"]["donor_shapes"])


def test_the_published_numbers_of_the_122b_are_in_its_file(tensors):
    counts = tensors["counts"]
    assert counts["base"] + counts["mtp"] == 112_901
    assert (counts["swap"], counts["donor_unmatched"]) == (144, 408)


@pytest.mark.parametrize("key", ["base", "mtp", "swap", "donor_unmatched"])
def test_a_pattern_too_few_is_found_by_the_count(tensors, key):
    tensors[key] = tensors[key][:-1]
    message = refused(tensors)
    assert f"tensors.{key}: stands for" in message
    assert f"counts.{key} says {tensors['counts'][key]}" in message


def test_a_donor_without_shapes_is_refused(tensors):
    tensors["donor_shapes"] = []
    assert "describes other modules than tensors.swap names" in refused(tensors)
    assert problems(tensors, donor=None) == []


def test_a_module_described_twice_is_refused(tensors):
    tensors["donor_shapes"] *= 2
    assert "a second time" in refused(tensors)


def test_scales_that_are_not_the_weights_blocks_are_refused(tensors):
    tensors["donor_shapes"][0]["scale"] = [24, 8]
    assert "a weight of [1024, 3072] has scales [8, 24]" in refused(tensors)


def test_a_broken_pattern_is_named_with_its_key(tensors):
    tensors["donor_shapes"][0]["modules"] = "a{b"
    assert "tensors.donor_shapes: 'a{b': a brace is not closed" in refused(tensors)
