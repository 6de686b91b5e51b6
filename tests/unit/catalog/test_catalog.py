import copy
import shutil
from pathlib import Path

import pytest
import yaml

from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.catalog.model import HybridModel, Tensors
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.documents import convert
from spark_deploy.config.errors import CatalogError
from spark_deploy.config.schema_errors import dotted
from tests.unit.planning.plans import CATALOG, FIXTURE, shipped_catalog


@pytest.fixture
def checkout(tmp_path):
    return Path(shutil.copytree(FIXTURE, tmp_path / "checkout"))


def changed(checkout, name, **keys):
    path = checkout / f"catalog/{name}.yml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text("utf-8")), **keys}))
    return checkout


def test_invalid_model_file_affects_only_that_model(checkout):
    catalog = read_catalog(changed(checkout, "models/huge", summary=7))
    assert catalog.model("small") == CATALOG.model("small")
    assert catalog.profile("v2", "large") == CATALOG.profile("v2", "large")
    message = r"catalog/models/huge.yml: summary: 7 is not text"
    with pytest.raises(CatalogError, match=message):
        catalog.model("huge")
    with pytest.raises(CatalogError, match=message):
        catalog.profile("v2", "huge")


def test_invalid_profile_change_affects_only_that_model_and_profile(checkout):
    change = {"when": {"kv_cache": {"starts_with": "turbo"}}, "set": {"limits": {"sequences": 1}}}
    catalog = read_catalog(changed(checkout, "models/small", changes=[change]))
    assert catalog.profile("v2-tq", "large") == CATALOG.profile("v2-tq", "large")
    assert catalog.profile("v2", "small") == CATALOG.profile("v2", "small")
    where = r"catalog/models/small.yml: changes of profile v2-tq: limits.sequences: unknown key"
    with pytest.raises(CatalogError, match=where):
        catalog.profile("v2-tq", "small")


def test_invalid_and_missing_profiles_have_different_messages(checkout):
    catalog = read_catalog(changed(checkout, "profiles/agent", plugin="yes please"))
    with pytest.raises(CatalogError, match=r"catalog/profiles/agent.yml: plugin"):
        catalog.profile("agent", "large")
    missing = r"catalog/profiles/v9.yml: does not exist\n.*known here"
    with pytest.raises(CatalogError, match=missing):
        catalog.profile("v9", "large")
    assert "agent" not in catalog.profile_names


def test_later_profile_changes_win_but_conditions_use_the_original_profile(checkout):
    changes = [
        {"set": {"limits": {"max_sequences": 8}, "prefix_caching": True}},
        {"when": {"prefix_caching": {"is": True}}, "set": {"limits": {"max_sequences": 2}}},
    ]
    catalog = read_catalog(changed(checkout, "models/large", changes=changes))
    assert catalog.profile("v2", "large").limits.max_sequences == 8
    assert catalog.profile("agent", "large").limits.max_sequences == 2


def test_rejects_condition_on_unknown_key(checkout):
    changes = [{"when": {"name": {"is": "v2"}}, "set": {"vision": True}}]
    catalog = read_catalog(changed(checkout, "models/large", changes=changes))
    with pytest.raises(CatalogError, match="changes"):
        catalog.model("large")


def test_unreadable_user_catalog_file_fails_only_where_it_is_used(tmp_path):
    (tmp_path / "catalog/profiles/base.yml").mkdir(parents=True)
    catalog = read_catalog(FIXTURE, user_dir=tmp_path)
    assert catalog.profile("v2", "large") == CATALOG.profile("v2", "large")
    with pytest.raises(CatalogError, match="base"):
        catalog.profile("base", "large")


def test_user_catalog_files_replace_shipped_files_and_the_plan_says_so(tmp_path):
    models, profiles = tmp_path / "catalog/models", tmp_path / "catalog/profiles"
    models.mkdir(parents=True)
    profiles.mkdir()
    (profiles / "base.yml").write_text(
        "based_on: base\nsummary: Mine\nchoose_when: I want it\nlimits: {max_sequences: 2}\n"
    )
    (models / "mine.yml").write_text("based_on: large\nsummary: Mine, too\n")
    shutil.copy(FIXTURE / "catalog/models/large.yml", models)
    catalog = read_catalog(FIXTURE, user_dir=tmp_path)
    assert catalog.profile("base", "large").limits.max_sequences == 2
    assert catalog.profile("base", "large").plugin == CATALOG.profile("base", "large").plugin
    assert catalog.model("mine").memory == CATALOG.model("large").memory
    assert catalog.replaced == {"profiles/base"}
    [note] = catalog.notes("mine", "base")
    assert "catalog/profiles/base.yml" in note
    assert catalog.notes("mine", "v2") == ()
    for folder in (tmp_path / "other", FIXTURE):
        assert read_catalog(FIXTURE, user_dir=folder) == CATALOG


HYBRIDS = [n for n, m in shipped_catalog().models.items() if isinstance(m, HybridModel)]


def tensors_of(model):
    path = CHECKOUT / f"catalog/models/{model}.yml"
    return yaml.safe_load(path.read_text("utf-8")).get("tensors", {})


@pytest.fixture
def tensors():
    return copy.deepcopy(tensors_of("qwen3.5-122b"))


def tensor_problems(tensors, donor="Org/Donor"):
    broken = convert(Tensors, tensors).violations(donor=donor)
    return "\n".join(f"tensors.{dotted(b.key)}: {b.what}; {b.fix}" for b in broken)


@pytest.mark.parametrize("name", HYBRIDS)
def test_tensor_counts_and_shapes_in_the_catalog_have_a_source(name):
    tensors = tensors_of(name)  # empty if based_on another model
    counts = tensors.get("counts")
    assert counts is None or len(counts["source"]) > 10
    assert all(len(shape["source"]) > 10 for shape in tensors.get("donor_shapes", ()))


@pytest.mark.parametrize("key", ["base", "mtp", "swap", "donor_unmatched"])
def test_missing_pattern_is_detected_by_the_tensor_count(tensors, key):
    tensors[key] = tensors[key][:-1]
    message = tensor_problems(tensors)
    assert f"tensors.{key}: " in message
    assert f"counts.{key} is {tensors['counts'][key]}" in message


def test_rejects_donor_without_shapes(tensors):
    tensors["donor_shapes"] = []
    assert "modules are listed only here or only in swap" in tensor_problems(tensors)
    assert not tensor_problems(tensors, donor=None)


def test_rejects_donor_shapes_that_contradict_the_tensor_sets(tensors):
    twice = {**tensors, "donor_shapes": tensors["donor_shapes"] * 2}
    assert "repeats the name" in tensor_problems(twice)
    tensors["donor_shapes"][0]["scale"] = [24, 8]
    assert "write scale: [8, 24] for weight [1024, 3072]" in tensor_problems(tensors)
    tensors["donor_shapes"][0]["modules"] = "a{b"
    assert "tensors.donor_shapes: 'a{b': a brace is not closed" in tensor_problems(tensors)
