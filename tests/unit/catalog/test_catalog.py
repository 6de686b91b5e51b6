"""The catalog is read whole; what is wrong in it stops who names it, and nobody else."""

import shutil
from pathlib import Path

import pytest
import yaml

from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.errors import CatalogError
from tests.unit.planning.plans import CATALOG, FIXTURE


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "checkout"))


def changed(checkout: Path, name: str, **keys: object) -> Path:
    path = checkout / f"catalog/{name}.yml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text("utf-8")), **keys}))
    return checkout


def test_a_broken_model_stops_only_who_names_it(checkout: Path) -> None:
    found = read_catalog(changed(checkout, "models/huge", summary=7))
    assert found.model("small") == CATALOG.model("small")
    assert found.profile("v2", "large") == CATALOG.profile("v2", "large")
    for ask in (lambda: found.model("huge"), lambda: found.profile("v2", "huge")):
        with pytest.raises(CatalogError, match=r"catalog/models/huge.yml: summary: 7 is not text"):
            ask()


def test_a_change_that_makes_no_profile_stops_only_this_pair(checkout: Path) -> None:
    wrong = {"when": {"kv_cache": {"starts_with": "turbo"}}, "set": {"limits": {"sequences": 1}}}
    found = read_catalog(changed(checkout, "models/small", changes=[wrong]))
    assert found.profile("v2-tq", "large") == CATALOG.profile("v2-tq", "large")
    assert found.profile("v2", "small") == CATALOG.profile("v2", "small")
    where = r"catalog/models/small.yml: changes of profile v2-tq: limits.sequences: unknown key"
    with pytest.raises(CatalogError, match=where):
        found.profile("v2-tq", "small")


def test_a_broken_profile_and_one_that_is_not_there_are_told_apart(checkout: Path) -> None:
    found = read_catalog(changed(checkout, "profiles/agent", plugin="yes please"))
    with pytest.raises(CatalogError, match=r"catalog/profiles/agent.yml: plugin"):
        found.profile("agent", "large")
    with pytest.raises(
        CatalogError, match=r"catalog/profiles/v9.yml: does not exist\n.*known here"
    ):
        found.profile("v9", "large")
    assert "agent" not in found.profile_names


def test_later_changes_win_and_all_of_them_see_the_file(checkout: Path) -> None:
    rules = [
        {"set": {"limits": {"max_sequences": 8}, "prefix_caching": True}},
        {"when": {"prefix_caching": {"is": True}}, "set": {"limits": {"max_sequences": 2}}},
    ]
    found = read_catalog(changed(checkout, "models/large", changes=rules))
    assert found.profile("v2", "large").limits.max_sequences == 8
    assert found.profile("agent", "large").limits.max_sequences == 2


def test_a_condition_on_what_profiles_do_not_say_is_refused_with_what_they_do(
    checkout: Path,
) -> None:
    rules = [{"when": {"name": {"is": "v2"}}, "set": {"vision": True}}]
    found = read_catalog(changed(checkout, "models/large", changes=rules))
    with pytest.raises(CatalogError, match="changes"):
        found.model("large")


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("gdn_key_heads", r"linear_attention: \{key_heads"),
        ("profile_overrides", "changes, a list of"),
    ],
)
def test_a_key_of_an_earlier_catalog_is_refused_with_its_new_spelling(
    checkout: Path, key: str, advice: str
) -> None:
    model = yaml.safe_load((checkout / "catalog/models/large.yml").read_text("utf-8"))
    old = {key: {"v2": {}}}
    if key.startswith("gdn"):
        old = {"architecture": {**model["architecture"], key: 16}}
    found = read_catalog(changed(checkout, "models/large", **old))
    with pytest.raises(CatalogError, match=f"{key}: unknown key\n  fix: write {advice}"):
        found.model("large")


def test_files_beside_an_inventory_win_by_name_and_the_plan_says_so(tmp_path: Path) -> None:
    """A profile of one's own, based on ours of the same name, and a model that is nobody else's."""
    models, profiles = tmp_path / "catalog/models", tmp_path / "catalog/profiles"
    models.mkdir(parents=True)
    profiles.mkdir()
    (profiles / "base.yml").write_text(
        "based_on: base\nsummary: Mine\nchoose_when: I say so\nlimits: {max_sequences: 2}\n"
    )
    (models / "mine.yml").write_text("based_on: large\nsummary: Mine, too\n")
    found = read_catalog(FIXTURE, own=tmp_path)
    assert found.profile("base", "large").limits.max_sequences == 2
    assert found.profile("base", "large").plugin == CATALOG.profile("base", "large").plugin
    assert found.model("mine").memory == CATALOG.model("large").memory
    assert found.replaced == {"profiles/base"}
    [note] = found.notes("mine", "base")
    assert "catalog/profiles/base.yml" in note
    assert found.notes("mine", "v2") == ()
    # In a folder without a catalog, and in ours, nothing is anybody's own.
    assert read_catalog(FIXTURE, own=tmp_path / "other") == CATALOG
    assert read_catalog(FIXTURE, own=FIXTURE) == CATALOG


def test_a_mistake_in_a_file_of_ones_own_is_told_as_in_ours(tmp_path: Path) -> None:
    folder = tmp_path / "catalog/models"
    folder.mkdir(parents=True)
    (folder / "mine.yml").write_text("kind: plain\nrepository: not a repository\n")
    found = read_catalog(FIXTURE, own=tmp_path)
    with pytest.raises(CatalogError, match=r"catalog/models/mine.yml: repository"):
        found.model("mine")
