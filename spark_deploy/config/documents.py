"""Documents that people write: pydantic dataclasses, their JSON schemas, and rules between keys.

jsonschema checks data against the schema that pydantic writes (``schema_errors.problems_of``), then
``convert`` builds the document and applies its rules.
"""

from __future__ import annotations

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
FromKey = Annotated[SkipJsonSchema[str], Field(exclude=True)]  # filled by ``name_entries``


def form(pattern: str, description: str, example: str) -> JsonDict:
    """Return the schema of a text: jsonschema checks the pattern, errors quote the description."""
    return {"pattern": pattern, "patternErrorMessage": f"write {description}, such as {example}"}


def name_entries(field: str) -> BeforeValidator:
    """Put the key of each entry of a mapping into this field; for use in ``Annotated``."""

    def add_key_as_field(entries: Any) -> Any:
        if not isinstance(entries, dict):
            return entries
        return {k: {**v, field: k} if isinstance(v, dict) else v for k, v in entries.items()}

    return BeforeValidator(add_key_as_field)


class Violation(NamedTuple):
    """A broken rule between keys; ``set_by`` is another key that names the file."""

    key: KeyPath
    what: str
    fix: str
    set_by: KeyPath | None = None


def rules(find: Callable[[Any, Any], Iterator[Violation]]) -> AfterValidator:
    """Return a validator, for ``Annotated``, that refuses a document with all broken rules.

    Args:
        find: yields the broken rules of a document, given the context of ``convert``.
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


# For documents that know their own rules.
OWN_RULES = rules(lambda document, _: document.violations())

# Building an adapter takes milliseconds.
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def convert(cls: type[_T], data: Any, context: Any = None) -> _T:
    """Build a document from plain data.

    Raises:
        pydantic.ValidationError: with all broken rules; ``violations`` reads them.
    """
    return cast(_T, _adapter(cls).validate_python(data, context=context))


def violations(error: ValidationError) -> Iterator[Violation]:
    for each in error.errors(include_url=False):
        context = each.get("ctx", {})
        fix = context.get("fix", "correct it")
        yield Violation(each["loc"], each["msg"], fix, context.get("set_by"))


def typed(value: Any, *, nulls: bool = True) -> dict[str, Any]:
    """Return a document as YAML data, with or without keys that are null."""
    data = _adapter(type(value)).dump_python(value, mode="json", exclude_none=not nulls)
    return cast(dict[str, Any], data)


def digest_of(value: Any) -> str:
    """Return 64 hex digits that change exactly when the content of ``value`` does."""
    text = json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def schema_of(cls: type[Any], name: str) -> Schema:
    """Return the JSON schema (2020-12) of a document, without references."""
    raw = _adapter(cls).json_schema(schema_generator=_WithDocstrings)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"{name}.schema.json"}
    return {**head, **_tidy(raw, raw.pop("$defs", {}))}


class _WithDocstrings(GenerateJsonSchema):
    """pydantic's schema; the text below a field in its source is the key's description."""

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> Schema:
        result = super().dataclass_schema(schema)
        # pydantic puts fields without ``Field(...)`` last.
        declared = result["properties"]
        order = [name for name in schema["cls"].__dataclass_fields__ if name in declared]
        result["properties"] = {name: declared[name] for name in dict.fromkeys([*order, *declared])}
        for cls in schema["cls"].__mro__[:-1]:
            for name, text in _texts_below_fields(cls).items():
                if name in result["properties"]:
                    result["properties"][name].setdefault("description", text)
        return result


@functools.cache
def _texts_below_fields(cls: type[Any]) -> dict[str, str]:
    [body] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    pairs = itertools.pairwise(body.body) if isinstance(body, ast.ClassDef) else ()
    return {
        field.target.id: str(text.value.value)
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }  # fmt: skip


def _tidy(node: Schema, parts: Schema) -> Schema:
    """Simplify one level of pydantic's schema for error messages and editors."""
    node = {**parts.get(node.get("$ref", "").rpartition("/")[2], {}), **node}
    node = {key: value for key, value in node.items() if key not in ("title", "$ref")}
    if node.get("default", 0) is None:
        del node["default"]  # YAML editors would write it out
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    if "properties" in node:
        node["properties"] = {k: _tidy(v, parts) for k, v in node["properties"].items()}
        node["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            node[key] = _tidy(node[key], parts)
    if "anyOf" in node:
        node = _merge_null([_tidy(part, parts) for part in node.pop("anyOf")], node)
    if "enum" in node or "const" in node:
        node.pop("type", None)
    if "based_on" in node.get("properties", {}):  # the other file has the rest
        node |= {"if": {"required": ["based_on"]}, "then": True, "else": _take_required(node)}
    return node


def _merge_null(parts: list[Schema], rest: Schema) -> Schema:
    """Return ``X or null`` as a single level, so that errors are about X."""
    others = [part for part in parts if part != {"type": "null"}]
    if len(others) > 1 or "anyOf" in others[0]:
        return {"anyOf": parts, **rest}
    if "enum" in others[0]:
        return {**others[0], "enum": [*others[0]["enum"], None], **rest}
    return {**others[0], "type": [others[0]["type"], "null"], **rest}


def _take_required(node: Schema) -> Schema:
    """Remove required keys from a level and all below it; return them as a schema of their own."""
    taken: Schema = {"required": node.pop("required")} if "required" in node else {}
    inner = {k: rest for k, v in node.get("properties", {}).items() if (rest := _take_required(v))}
    return {**taken, **({"properties": inner} if inner else {})}
