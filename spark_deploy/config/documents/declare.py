"""Declare the keys of a document once: type, default, meaning, limits.

A document is a frozen dataclass. What ``setting`` and ``needed`` say of its fields becomes its JSON
schema (``schema_of``), its defaults as people type them (``typed``) and the conversion of data that
follows the schema (``convert``). The class's docstring is the description of the whole.

pydantic writes the schema and converts; the limits are for jsonschema alone, which checks documents
by that schema and names every mistake at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, PlainSerializer, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema
from spark_contract.documents import OPTIONAL

MIB = 1024**2
GIB = 1024**3

_T = TypeVar("_T")
Schema = dict[str, Any]


def setting(
    default: _T | Callable[[], _T],
    description: str,
    *,
    key: str | None = None,
    heading: str | None = None,
    note: Any = None,
    **keywords: Any,
) -> _T:
    """Declare a key that may be left out.

    Args:
        default: value, or what makes one, in the units of the field.
        description: what it means, in plain sentences; shown in errors and reference pages.
        key: what people type, when it differs from the field: sizes are typed in GiB or MiB.
        heading: chapter of ``group_vars/all.yml`` that starts here, and a paragraph about it.
        note: what else is to be known of the field, for ``notes_of``.
        keywords: further keywords of JSON schema: limits, pattern, examples.
    """
    said = _said(description, key, heading, keywords, note)
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=said)
    return dataclasses.field(default=default, metadata=said)


def needed(
    description: str | None = None, *, key: str | None = None, note: Any = None, **keywords: Any
) -> Any:
    """Declare a key that must be there; arguments as in ``setting``."""
    return dataclasses.field(metadata=_said(description, key, None, keywords, note))


def instead_of(
    cls: type[Any], name: str, description: str | None = None, *, key: str | None = None
) -> Any:
    """Declare a key that replaces one of another document within its limits; null keeps that."""
    [field] = (field for field in dataclasses.fields(cls) if field.name == name)
    said = {name: one for name, one in (("description", description), ("alias", key)) if one}
    return dataclasses.field(default=None, metadata={**field.metadata, **said, "note": None})


def notes_of(cls: type[Any]) -> dict[str, Any]:
    """Return the fields of a document that were declared with a note, and the note."""
    fields = dataclasses.fields(cls)
    return {one.name: one.metadata["note"] for one in fields if one.metadata.get("note")}


def later(default: _T, description: str) -> _T:
    """Declare a key that documents of earlier versions lack; left out while it has its default."""
    said = _said(description, None, None, {})
    return dataclasses.field(default=default, metadata={**said, **OPTIONAL})


def form(pattern: str, what: str, example: str) -> Schema:
    """Declare what text has to look like: keywords for ``setting``, ``needed`` and ``about``.

    Args:
        pattern: its form, for machines.
        what: the same in words, after "write"; editors and errors say it to people.
        example: one that has the form.
    """
    return {"pattern": pattern, "patternErrorMessage": f"write {what}, such as {example}"}


def section(cls: type[_T], *, heading: str | None = None) -> _T:
    """Declare a mapping of settings, which has a class of its own; its docstring describes it."""
    return dataclasses.field(default_factory=cls, metadata=_said(None, None, heading, {}))


def of_key() -> Any:
    """Declare a field that is filled with an entry's key by ``knowing_keys``, not typed."""
    return dataclasses.field(metadata={"exclude": True})


def knowing_keys(field: str) -> BeforeValidator:
    """Have every entry of a mapping know its key as this field; for use in ``Annotated``."""
    return BeforeValidator(lambda items: {key: {**one, field: key} for key, one in items.items()})


def about(description: str | None = None, **keywords: Any) -> Any:
    """Describe a type, for use in ``Annotated``: items of a list, values of a mapping."""
    return Field(description=description, json_schema_extra=keywords)


def _said(
    description: str | None,
    key: str | None,
    heading: str | None,
    keywords: Schema,
    note: Any = None,
) -> dict[str, Any]:
    said = {"description": description, "alias": key, "json_schema_extra": keywords, "note": note}
    return {"heading": heading, **{name: value for name, value in said.items() if value}}


def in_unit(size_bytes: int, unit: int) -> float | int:
    """Return a size as people type it; a whole number where it is one."""
    value = round(size_bytes / unit, 3)
    return int(value) if value == int(value) else value


def in_gib(size_bytes: int) -> float | int:
    """Return a size in GiB, as people type it."""
    return in_unit(size_bytes, GIB)


def _times(unit: int) -> BeforeValidator:
    return BeforeValidator(lambda value: round(value * unit), json_schema_input_type=float)


def _over(unit: int) -> PlainSerializer:
    return PlainSerializer(lambda size_bytes: in_unit(size_bytes, unit))


# Bytes that people type in a larger unit; the key of such a setting ends in _gib or _mib.
Gib = Annotated[int, _times(GIB), _over(GIB)]
Mib = Annotated[int, _times(MIB), _over(MIB)]
Text = Annotated[str, about(minLength=1)]


# What a class declares never changes, so each is looked at once.
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def convert(cls: type[_T], data: Any) -> _T:
    """Build ``cls`` from plain data that follows its schema: defaults, bytes, tuples."""
    document: _T = _adapter(cls).validate_python(data)
    return document


def typed(value: Any, *, nulls: bool = True) -> dict[str, Any]:
    """Return a document as people would type it, with or without keys that say null."""
    data: dict[str, Any] = _adapter(type(value)).dump_python(
        value, mode="json", by_alias=True, exclude_none=not nulls
    )
    return data


def schema_of(cls: type[Any], name: str) -> Schema:
    """Return the JSON schema (2020-12) of the documents that ``cls`` declares, closed everywhere.

    What is used once stands where it is used; what several keys share stands in ``$defs``.
    """
    raw = _adapter(cls).json_schema(schema_generator=_Typed)
    parts = raw.pop("$defs", {})
    uses = Counter(_references([raw, parts]))
    shared = {ref: part for ref, part in parts.items() if uses[_DEFS + ref] > 1}
    inline = {_DEFS + ref: part for ref, part in parts.items() if ref not in shared}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"{name}.schema.json"}
    defs = {ref: _tidy(part, inline) for ref, part in shared.items()}
    return {**head, **_tidy(raw, inline), **({"$defs": defs} if defs else {})}


_DEFS = "#/$defs/"


class _Typed(GenerateJsonSchema):
    """pydantic's schema, with defaults as people type them."""

    def get_default_value(self, schema: core_schema.WithDefaultSchema) -> Any:
        default = super().get_default_value(schema)
        as_typed: Any = schema["schema"].get("serialization", {})
        return as_typed["function"](default) if "function" in as_typed else default


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (node["$ref"],) if "$ref" in node else ()
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from _references(part)


def _tidy(node: Schema, inline: Schema) -> Schema:
    """Return a level of pydantic's schema as people would write it; errors quote it."""
    node = {key: value for key, value in node.items() if key != "title"}
    if node.get("$ref") in inline:
        node = {**inline[node.pop("$ref")], **node}
        return _tidy(node, inline)
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    if "properties" in node:
        node["properties"] = {k: _tidy(v, inline) for k, v in node["properties"].items()}
        node["additionalProperties"] = False
    elif node.get("type") == "object":  # YAML has keys that are no text
        node["propertyNames"] = {"type": "string", **node.get("propertyNames", {})}
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            node[key] = _tidy(node[key], inline)
    if "anyOf" in node:
        node = _choice([_tidy(part, inline) for part in node.pop("anyOf")], node)
    if "enum" in node or "const" in node:
        node.pop("type", None)
    return _for_editors(node)


def _for_editors(node: Schema) -> Schema:
    """Return a level without what the YAML language server fails at, or wrongly marks."""
    if node.get("default", 0) is None:
        del node["default"]  # left out means nothing
    if "based_on" in node.get("properties", {}):  # what is left out is that of the other
        node |= {"if": {"required": ["based_on"]}, "then": True, "else": _taken_required(node)}
    return node


def _taken_required(node: Schema) -> Schema:
    """Take from a level and those in it what has to be there; return it as a schema of its own."""
    found: Schema = {"required": node.pop("required")} if "required" in node else {}
    inner = {key: rest for key, part in node.get("properties", {}).items()
             if (rest := _taken_required(part))}  # fmt: skip
    return {**found, **({"properties": inner} if inner else {})}


def _choice(parts: list[Schema], rest: Schema) -> Schema:
    """Return ``X or null`` as one level, so that an error speaks of X."""
    others = [part for part in parts if part != {"type": "null"}]
    if len(others) > 1 or "$ref" in others[0]:
        return {"anyOf": parts, **rest}
    if "enum" in others[0]:
        return {**others[0], "enum": [*others[0]["enum"], None], **rest}
    return {**others[0], "type": [others[0]["type"], "null"], **rest}
