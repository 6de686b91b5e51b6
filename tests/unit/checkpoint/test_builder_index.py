"""The index is read as JSON reads it, and as what it is: one map of names to files."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spark_checkpoint.errors import GateRefused
from spark_checkpoint.headers import parse_weight_map

TEXT = st.text(max_size=8)
NAMES = st.dictionaries(TEXT, TEXT, max_size=6)
LAYOUTS = ({}, {"indent": 2}, {"indent": "\t"}, {"separators": (",", ":")}, {"ensure_ascii": False})


def read(text, **more):
    return parse_weight_map(
        text.encode("utf-8", "surrogatepass"), "the index", "look at it", **more
    )


@given(NAMES, st.sampled_from(LAYOUTS), st.booleans())
def test_every_way_of_writing_it_gives_the_map_that_json_gives(names, layout, first):
    other = {"metadata": {"total_size": 1, "weight_map": {"not": "this"}}}
    document = {"weight_map": names, **other} if first else {**other, "weight_map": names}
    text = json.dumps(document, **layout)
    assert read(text) == json.loads(text)["weight_map"]


def test_a_plain_index_is_never_parsed_as_a_whole(monkeypatch):
    names = {f"layers.{n}.weight": f"model-{n // 100}.safetensors" for n in range(1000)}
    text = json.dumps({"metadata": {}, "weight_map": names}, indent=2)
    parsed = []
    loads = json.loads
    monkeypatch.setattr(
        json, "loads", lambda part, **how: parsed.append(len(part)) or loads(part, **how)
    )
    found = read(text)
    assert found == names
    assert max(parsed) < 100
    assert len({id(file) for file in found.values()}) == 10


def test_only_the_names_to_keep_are_kept():
    assert read('{"weight_map": {"a": "x", "b": "y"}}', keep=lambda name: name == "b") == {"b": "y"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("[]", "has no weight_map"),
        ("{}", "has no weight_map"),
        ('{"metadata": {"weight_map": {"a": "x"}}}', "has no weight_map"),
        ('{"metadata": {"weight_map": {"a": "x"}}, "weight_map": NaN}', "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "has no weight_map"),
        ('{"weight_map": {"a": "x"}', "is not JSON"),
        ('{"weight_map": {"a": "x",}}', "is not JSON"),
        ('{"weight_map": {"a": "x"}} {}', "is not JSON"),
        ('{"weight_map": {"a": "x"},}', "is not JSON"),
        ('{"weight_map": {"a" "x"}}', "is not JSON"),
        ("{" + '"a":' * 9 + "1", "is not JSON"),
        ('{"a": ' + "[" * 100_000, "is not JSON"),
        ('{"weight_map": {"a": "x"}, "a": ' + "[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_no_index_is_refused(text, said):
    with pytest.raises(GateRefused, match=said):
        read(text)


def test_a_name_given_twice_is_in_the_last_file_named():
    text = '{"weight_map": {"a": "x", "a": "y"}}'
    assert read(text) == json.loads(text)["weight_map"] == {"a": "y"}


def test_bytes_that_are_no_utf_8_are_refused():
    with pytest.raises(GateRefused, match="is not JSON"):
        parse_weight_map(b'{"weight_map": {"\xff": "x"}}', "the index", "look at it")
