import json
import re

import jsonschema
import pytest
import yaml

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.schema_errors import dotted
from spark_deploy.config.settings.load import merge

SCHEMAS = sorted((CHECKOUT / "schema").glob("*.schema.json"))


def schema_of(name):
    return json.loads((CHECKOUT / "schema" / f"{name}.schema.json").read_text("utf-8"))


def levels(schema, path=""):
    yield path, schema
    for key, part in schema.get("properties", {}).items():
        yield from levels(part, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict) and "$ref" not in schema[key]:
            yield from levels(schema[key], f"{path}[]")
    for key, part in schema.get("$defs", {}).items():
        yield from levels(part, f"$defs.{key}")


def test_line_breaks_in_key_paths_are_escaped():
    assert dotted(("sources", "a\nb", 0)) == r"'sources.a\nb[0]'"


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_schemas_are_valid_and_have_valid_examples_and_reject_unknown_keys(path):
    schema = json.loads(path.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"].endswith("2020-12/schema")
    for where, part in levels(schema):
        if "properties" in part:
            assert part.get("additionalProperties") is False, f"{where} takes unknown keys"
            for key, value in part["properties"].items():
                assert value.get("description"), f"{where}.{key} has no description"
        for example in part.get("examples", ()):
            whole = {**part, "$defs": schema.get("$defs", {})}
            problems = list(jsonschema.Draft202012Validator(whole).iter_errors(example))
            assert not problems, f"{where}: {problems}"


# Machines write the rest.
WRITTEN_BY_PEOPLE = (
    "families", "guard_rails", "hosts", "model", "plain_model", "profile", "settings",
)  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN_BY_PEOPLE)
def test_patterns_have_a_message_with_a_valid_example(name):
    for where, part in patterns(schema_of(name)):
        words, _, example = part.get("patternErrorMessage", "").rpartition(", such as ")
        assert words.startswith("write "), where
        assert re.search(part["pattern"], example), f"{where}: {example}"


def patterns(part, where=""):
    if isinstance(part, dict):
        if isinstance(part.get("pattern"), str):
            yield where, part
        for key, value in part.items():
            yield from patterns(value, f"{where}/{key}")
    elif isinstance(part, list):
        for number, value in enumerate(part):
            yield from patterns(value, f"{where}/{number}")


YAML_FILES = [
    path
    for folder in ("group_vars", "host_vars", "catalog")
    for path in sorted((CHECKOUT / folder).rglob("*.yml"))
]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_shipped_yaml_files_match_their_schemas(path):
    text = path.read_text("utf-8")
    first = text.splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema="), "editors need this line"
    named = (path.parent / first.partition("$schema=")[2]).resolve()
    assert named in SCHEMAS, f"{named} is not a schema of this project"
    schema = json.loads(named.read_text("utf-8"))
    data = yaml.safe_load(text) or {}
    if "based_on" in data:
        parent = yaml.safe_load((path.parent / f"{data.pop('based_on')}.yml").read_text("utf-8"))
        data = merge(parent, data, keep_on_null=False)
    jsonschema.Draft202012Validator(schema).validate(data)
