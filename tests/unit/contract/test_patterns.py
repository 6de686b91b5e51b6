import pytest
from hypothesis import given
from hypothesis import strategies as st
from spark_checkpoint.tensor_sets import summarize_names
from spark_contract.builder_api import (
    PatternError,
    count_names,
    expand,
    expand_all,
    remove_exact_matches,
)

from tests.unit.planning.plans import shipped_catalog

CATALOG = shipped_catalog()


def test_every_layer_of_the_122b_has_one_attention_type():
    names = expand_all(CATALOG.model("qwen3.5-122b").tensors.base)
    kinds = {name.split(".")[3]: name.split(".")[4] for name in names if "_attn." in name}
    assert len(kinds) == 48
    assert [layer for layer in range(48) if kinds[str(layer)] == "self_attn"] == list(
        range(3, 48, 4)
    )


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a", ["a"]),
        ("a.{3..11..4}.b", ["a.3.b", "a.7.b", "a.11.b"]),
        ("{x,y}.{0..1}", ["x.0", "x.1", "y.0", "y.1"]),
        ("a{,s}", ["a", "as"]),
    ],
)
def test_patterns_expand_braces_in_order(pattern, names):
    assert list(expand(pattern)) == names
    assert count_names(pattern) == len(names)


@pytest.mark.parametrize(
    "pattern",
    [
        "a{",
        "a}",
        "{a,{b,c}}",
        "{a}",
        "{a,a}",
        "{2..1}",
        "{0..4..0}",
        "{}",
        "{0..9999999}",
        "{0..1999}{0..1999}",
    ],
)
def test_rejects_malformed_pattern(pattern):
    with pytest.raises(PatternError):
        list(expand(pattern))


def test_rejects_patterns_that_expand_to_the_same_name():
    with pytest.raises(PatternError, match="repeats the name"):
        expand_all(["a.{0..3}", "a.3"])


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 9))
def test_pattern_ranges_expand_to_every_number(first, more, step):
    names = list(expand(f"l{{{first}..{first + more}..{step}}}"))
    assert names == [f"l{n}" for n in range(first, first + more + 1, step)]


@pytest.mark.parametrize(
    ("names", "patterns", "right"),
    [
        ({"a0", "a1", "b"}, ["a{0..1}", "b"], True),
        ({"a0", "a1", "b"}, ["a{0..1}"], False),
        ({"a0"}, ["a{0..1}"], False),
        ({"a0", "a1"}, ["a{0..1}", "a1"], False),
    ],
)
def test_exact_match_requires_each_name_once(names, patterns, right):
    assert remove_exact_matches(names, patterns) is right


def test_name_summary_groups_names_that_differ_only_in_numbers():
    assert summarize_names([f"a.{n}.b" for n in range(300)] + ["c"]) == "300 x a.{N}.b, 1 x c"
