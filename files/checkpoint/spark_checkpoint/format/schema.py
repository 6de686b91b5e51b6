"""Checks a document against the part of JSON Schema our own schemas use.

The hosts have no jsonschema package. A keyword this file does not know is an error of the
schema, so that no rule is ever skipped silently.
"""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_ANNOTATIONS = frozenset({"$schema", "title", "description", "default", "examples"})
_KNOWN = _ANNOTATIONS | {
    "type",
    "const",
    "enum",
    "anyOf",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "items",
    "minItems",
    "maxItems",
    "required",
    "properties",
    "additionalProperties",
}


def load_schema(name: str) -> dict[str, Any]:
    """Return one of the schemas shipped inside the package."""
    text = resources.files("spark_checkpoint").joinpath(f"schemas/{name}").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def problems(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """Return every way ``value`` breaks ``schema``, each with its place in the document."""
    unknown = schema.keys() - _KNOWN
    if unknown:
        raise ValueError(f"schema keywords {sorted(unknown)} are not supported here")
    place = where or "document"
    types = schema.get("type")
    if types is not None and not _has_type(value, types):
        return [f"{place}: must be {types}, not {type(value).__name__}"]
    found = _scalar_problems(value, schema, place)
    if "anyOf" in schema:
        branches: list[list[str]] = [problems(value, one, where) for one in schema["anyOf"]]
        if all(branches):
            found += sorted(branches, key=lambda branch: len(branch))[0]
    if isinstance(value, dict):
        found += _object_problems(value, schema, where)
    if isinstance(value, list):
        found += _array_problems(value, schema, where)
    return found


def _has_type(value: Any, types: str | list[str]) -> bool:
    names = [types] if isinstance(types, str) else types
    if isinstance(value, bool):  # to Python a whole number, to JSON a type of its own
        return "boolean" in names
    return any(isinstance(value, _TYPES[name]) for name in names)


def _scalar_problems(value: Any, schema: dict[str, Any], place: str) -> list[str]:
    found = []
    if "const" in schema and (value != schema["const"] or isinstance(value, bool)):
        found.append(f"{place}: must be {schema['const']!r}, not {value!r}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{place}: must be one of {schema['enum']}, not {value!r}")
    if isinstance(value, str):
        # Python's `$` also matches before a final newline, JSON Schema's does not.
        if "pattern" in schema and (
            value.endswith("\n") or not re.search(schema["pattern"], value)
        ):
            found.append(f"{place}: {value!r} does not match {schema['pattern']}")
        if len(value) < schema.get("minLength", 0):
            found.append(f"{place}: is empty")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if "minimum" in schema and value < schema["minimum"]:
            found.append(f"{place}: {value} is below {schema['minimum']}")
        if "maximum" in schema and value > schema["maximum"]:
            found.append(f"{place}: {value} is above {schema['maximum']}")
    return found


def _object_problems(value: dict[str, Any], schema: dict[str, Any], where: str) -> list[str]:
    prefix = f"{where}." if where else ""
    properties = schema.get("properties", {})
    found = [
        f"{prefix}{key}: is missing" for key in schema.get("required", ()) if value.get(key) is None
    ]
    for key, item in value.items():
        if key in properties:
            found += problems(item, properties[key], f"{prefix}{key}")
        elif schema.get("additionalProperties") is False:
            found.append(f"{prefix}{key}: is not a key here (known: {', '.join(properties)})")
    return found


def _array_problems(value: list[Any], schema: dict[str, Any], where: str) -> list[str]:
    found = []
    if len(value) < schema.get("minItems", 0):
        found.append(f"{where}: needs {schema['minItems']} items or more")
    if "maxItems" in schema and len(value) > schema["maxItems"]:
        found.append(f"{where}: takes {schema['maxItems']} items or fewer")
    if "items" in schema:
        for number, item in enumerate(value):
            found += problems(item, schema["items"], f"{where}[{number}]")
    return found
