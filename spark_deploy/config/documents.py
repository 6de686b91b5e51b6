"""Documents that people write: pydantic dataclasses, their JSON schemas, and rules between keys.

``schema_errors.schema_problems`` checks data against pydantic's JSON schema; then ``convert``
builds the document and checks its rules.
"""

import ast
import functools
import hashlib
import inspect
import itertools
import json
import textwrap
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, TypeVar, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)
from pydantic.config import JsonDict
from pydantic.json_schema import GenerateJsonSchema, SkipJsonSchema
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema
from spark_contract.documents import to_plain

GIB = 1024**3
MIB = 1024**2
CLOSED = ConfigDict(extra="forbid")
UNIQUE: JsonDict = {"uniqueItems": True}

_T = TypeVar("_T")
Schema = dict[str, Any]
KeyPath = tuple[str | int, ...]
Text = Annotated[str, Field(min_length=1)]
Gib = Annotated[float, PlainSerializer(lambda size: int(size) if size == int(size) else size)]
FromKey = Annotated[SkipJsonSchema[str], Field(exclude=True)]  # filled by ``key_as_field``


def text_schema(pattern: str, description: str, example: str) -> JsonDict:
    return {"pattern": pattern, "patternErrorMessage": f"write {description}, such as {example}"}


def key_as_field(field: str) -> BeforeValidator:
    """Return a validator that copies each key of a mapping into a field of its entry."""

    def add_key_as_field(entries: Any) -> Any:
        if not isinstance(entries, dict):
            return entries
        result = dict(entries)
        for key, entry in entries.items():
            if isinstance(entry, dict):
                result[key] = {**entry, field: key}
        return result

    return BeforeValidator(add_key_as_field)


class Violation(NamedTuple):
    """A broken rule between keys, reported for the file that sets ``set_by`` (default: ``key``)."""

    key: KeyPath
    what: str
    fix: str
    set_by: KeyPath | None = None


def rule_validator(find: Callable[[Any, Any], Iterator[Violation]]) -> AfterValidator:
    """Return a validator for ``Annotated`` that reports all broken rules of a document.

    ``find`` yields the broken rules, given the document and the context of ``convert``.
    """

    def check(document: _T, info: ValidationInfo) -> _T:
        errors = [
            InitErrorDetails(
                type=PydanticCustomError("rule", "{what}", violation._asdict()),
                loc=violation.key,
                input=None,
            )
            for violation in find(document, info.context)
        ]
        if errors:
            raise ValidationError.from_exception_data(type(document).__name__, errors)
        return document

    return AfterValidator(check)


# For documents with a method ``violations``.
CHECK_VIOLATIONS = rule_validator(lambda document, _: document.violations())

# Building an adapter takes milliseconds.
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def convert(cls: type[_T], data: Any, context: Any = None) -> _T:
    """Build a document from plain data; raise ValidationError with all broken rules."""
    return cast(_T, _adapter(cls).validate_python(data, context=context))


def violations(error: ValidationError) -> Iterator[Violation]:
    for details in error.errors(include_url=False):
        context = details.get("ctx", {})
        fix = context.get("fix", "correct it")
        yield Violation(details["loc"], details["msg"], fix, context.get("set_by"))


def to_yaml_data(document: Any, *, include_nulls: bool = True) -> dict[str, Any]:
    adapter = _adapter(type(document))
    data = adapter.dump_python(document, mode="json", exclude_none=not include_nulls)
    return cast(dict[str, Any], data)


def digest_of(value: Any) -> str:
    text = json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def schema_of(cls: type[Any], name: str) -> Schema:
    """Return the JSON schema (2020-12) of a document class, without references."""
    raw = _adapter(cls).json_schema(schema_generator=_WithDocstrings)
    definitions = raw.pop("$defs", {})
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"{name}.schema.json"}
    return {**head, **_simplify(raw, definitions)}


class _WithDocstrings(GenerateJsonSchema):
    """Generates schemas in which the docstring below a field describes the key."""

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> Schema:
        result = super().dataclass_schema(schema)
        # Restore the order of the fields: pydantic lists those without ``Field(...)`` last.
        properties = result["properties"]
        fields = [name for name in schema["cls"].__dataclass_fields__ if name in properties]
        result["properties"] = {name: properties[name] for name in fields} | properties
        for cls in schema["cls"].__mro__[:-1]:
            for name, text in _field_docstrings(cls).items():
                if name in result["properties"]:
                    result["properties"][name].setdefault("description", text)
        return result


@functools.cache
def _field_docstrings(cls: type[Any]) -> dict[str, str]:
    """Return the docstring below each field of a class, read from its source."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    statements = definition.body if isinstance(definition, ast.ClassDef) else ()
    return {
        field.target.id: str(text.value.value)
        for field, text in itertools.pairwise(statements)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }  # fmt: skip


def _simplify(node: Schema, definitions: Schema) -> Schema:
    """Simplify pydantic's schema for error messages and editors."""
    referenced = node.get("$ref", "").rpartition("/")[2]
    node = {**definitions.get(referenced, {}), **node}
    node = {key: value for key, value in node.items() if key not in ("title", "$ref")}
    if "default" in node and node["default"] is None:
        del node["default"]  # YAML editors would insert it
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    if "properties" in node:
        node["properties"] = {
            key: _simplify(value, definitions) for key, value in node["properties"].items()
        }
        node["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            node[key] = _simplify(node[key], definitions)
    if "anyOf" in node:
        node = _merge_null([_simplify(form, definitions) for form in node.pop("anyOf")], node)
    if "enum" in node or "const" in node:
        node.pop("type", None)
    if "based_on" in node.get("properties", {}):  # the other file has the required keys
        node |= {"if": {"required": ["based_on"]}, "then": True, "else": _take_required(node)}
    return node


def _merge_null(forms: list[Schema], rest: Schema) -> Schema:
    """Turn ``anyOf: [X, null]`` into X that may be null, so that error messages describe X."""
    form, *more = [form for form in forms if form != {"type": "null"}]
    if more or "anyOf" in form:
        return {"anyOf": forms, **rest}
    if "enum" in form:
        return {**form, "enum": [*form["enum"], None], **rest}
    return {**form, "type": [form["type"], "null"], **rest}


def _take_required(node: Schema) -> Schema:
    """Remove ``required`` from a schema, at all levels; return it as a separate schema."""
    removed: Schema = {"required": node.pop("required")} if "required" in node else {}
    for key, value in node.get("properties", {}).items():
        if inner := _take_required(value):
            removed.setdefault("properties", {})[key] = inner
    return removed
