"""Plans, patterns, schemas, and the catalog's exact sets."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from builder_hub import fetch_order
from builder_trees import ROOT
from hypothesis import given
from hypothesis import strategies as st
from spark_checkpoint.errors import InputRefused
from spark_checkpoint.format.patterns import expand, expand_all, groups
from spark_checkpoint.format.schema import load_schema, problems
from spark_checkpoint.plan import load_build_plan

SCHEMAS = ("checkpoint-plan.schema.json", "fetch.schema.json")


# --- patterns ----------------------------------------------------------------------------------

EXPANSIONS = {
    "plain.name": ["plain.name"],
    "a{0..2}": ["a0", "a1", "a2"],
    "a{3..11..4}b": ["a3b", "a7b", "a11b"],
    "{x,y}{1..2}": ["x1", "x2", "y1", "y2"],
    "a{,.b}": ["a", "a.b"],
}


@pytest.mark.parametrize("pattern", EXPANSIONS)
def test_a_pattern_gives_exactly_its_names(pattern):
    assert expand(pattern) == EXPANSIONS[pattern]


@pytest.mark.parametrize(
    "pattern", ["a{0..", "a}b", "a{b{c,d}}", "{3..1}", "{a}", "{a,a}", "{0..4..0}", "{0..9999999}"]
)
def test_a_broken_pattern_is_refused(pattern):
    with pytest.raises(InputRefused, match="pattern"):
        expand(pattern)


def test_patterns_that_give_a_name_twice_are_refused():
    with pytest.raises(InputRefused, match="twice"):
        expand_all(["a{0..3}", "a2"], "here")


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 9))
def test_ranges_agree_with_counting(first, more, step):
    names = expand(f"l{{{first}..{first + more}..{step}}}")
    assert names == [f"l{n}" for n in range(first, first + more + 1, step)]


def test_groups_count_numbers_as_one():
    assert groups([f"a.{n}.b" for n in range(300)] + ["c"]) == "300 x a.{N}.b, 1 x c"


# --- the catalog -------------------------------------------------------------------------------

# Published counts: base outside mtp.*, MTP, swapped modules, unmatched donor names.
COUNTS = {
    "qwen3.5-122b": (112_116, 785, 144, 408),
    "qwen3.5-35b": (93_486, 2_329, 120, 344),
    "qwen3.5-397b": (278_301, 1_553, 180, 504),
    "lab-tiny": (423, 41, 12, 56),
}


@pytest.mark.parametrize("model", COUNTS)
def test_the_catalogs_patterns_expand_to_the_published_counts(model):
    tensors = yaml.safe_load((ROOT / f"catalog/models/{model}.yml").read_text())["tensors"]
    keys = ("base", "mtp", "swap", "donor_unmatched")
    sets = {key: expand_all(tensors[key], key) for key in keys}
    assert tuple(len(sets[key]) for key in keys) == COUNTS[model]
    assert {f"{module}.weight" for module in sets["swap"]} <= sets["base"]
    assert all(name.startswith("mtp.") for name in sets["mtp"])
    assert not any(name.startswith("mtp.") for name in sets["base"])
    assert not sets["donor_unmatched"] & sets["base"]
    assert not any(".mlp.experts." in name for name in sets["donor_unmatched"])
    assert tensors["block_shape"] == [128, 128]


def test_the_122b_has_112901_names_before_and_113045_after():
    tensors = yaml.safe_load((ROOT / "catalog/models/qwen3.5-122b.yml").read_text())["tensors"]
    base = expand_all(tensors["base"], "base") | expand_all(tensors["mtp"], "mtp")
    scales = {f"{m}.weight_scale_inv" for m in expand_all(tensors["swap"], "swap")}
    assert len(base) == 112_901
    assert len(base | scales) == 113_045


# --- schemas -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_published_schema_is_the_one_the_builder_checks_with(name):
    assert json.loads((ROOT / "schema" / name).read_text()) == load_schema(name)
    jsonschema.Draft202012Validator.check_schema(load_schema(name))


def every_key(schema):
    for key, value in schema.get("properties", {}).items():
        yield key, value
        yield from every_key(value)
    for branch in schema.get("anyOf", ()):
        yield from every_key(branch)
    yield from every_key(schema["items"]) if "items" in schema else ()


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_key_is_described_and_has_an_example_or_default(name):
    for key, value in every_key(load_schema(name)):
        assert value.get("title"), key
        assert value.get("description"), key
        fixed = {"examples", "default", "const"} & value.keys()
        assert fixed or value.get("type") == "object", key


def changed(document, path, value):
    copy = json.loads(json.dumps(document))
    place = copy
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return copy


BROKEN = [
    (["digest"], None),
    (["digest"], "x"),
    (["digest"], "1" * 64 + "\n"),
    (["schema_version"], 2),
    (["schema_version"], True),
    (["base", "dir"], "relative"),
    (["base", "revision"], "main"),
    (["donor"], {"url": "https://h/r/resolve/main"}),
    (["donor"], {}),
    (["donor"], {"dir": "/a", "url": "https://h/r/resolve/" + "0" * 40}),
    (["block_shape"], [128]),
    (["block_shape"], [128, 0]),
    (["swap"], "a string"),
    (["head"], "int4"),
    (["layout"], "both"),
    (["shared_experts"], "fp8"),
    (["name"], ""),
    (["typo"], 1),
]


@pytest.mark.parametrize(("path", "value"), BROKEN)
def test_a_broken_plan_is_refused_by_both_validators(workshop, path, value):
    schema = load_schema(SCHEMAS[0])
    good = workshop.plan()
    validator = jsonschema.Draft202012Validator(schema)
    assert not problems(good, schema)
    assert not list(validator.iter_errors(good))
    bad = changed(good, path, value)
    assert problems(bad, schema)
    # Python's `$` lets a final newline pass; ours does not.
    assert list(validator.iter_errors(bad)) or str(value).endswith("\n")


def test_a_fetch_order_of_these_tests_is_valid(tmp_path):
    (tmp_path / "a").write_text("x")
    order = fetch_order(tmp_path, Path("/srv/out"), urls=["http://hub/r"])
    assert not problems(order, load_schema(SCHEMAS[1]))


def test_all_problems_of_a_plan_are_reported_at_once(workshop):
    path = workshop.write_plan(head="int4", layout="both", digest="x")
    with pytest.raises(InputRefused) as refusal:
        load_build_plan(path)
    for key in ("head", "layout", "digest"):
        assert f"{key}: " in str(refusal.value)


def test_a_plan_of_another_recipe_version_is_refused(workshop):
    with pytest.raises(InputRefused, match="made for recipe version 999"):
        load_build_plan(workshop.write_plan(recipe_version=999))


def test_swap_names_modules_not_tensors(workshop):
    with pytest.raises(InputRefused, match=r"without \.weight"):
        load_build_plan(workshop.write_plan(swap=["a.{0..3}.weight"]))
