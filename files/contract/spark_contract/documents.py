"""Read and write frozen dataclasses as JSON documents.

Keys are field names. Reading is strict; errors name the path: ``engine.mounts[0].source: missing``.
The reader requires the ``SCHEMA_VERSION`` of a class. Numbers keep their type, so documents
round-trip.
"""

import json
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_VERSION = "schema_version"


class DocumentError(ValueError):
    """A document is invalid; the message starts with the path to the key."""


OPTIONAL: Mapping[str, Any] = {"optional": True}
"""``field(default=..., metadata=OPTIONAL)``: omit the key if it has its default."""


def json_key(name: str) -> Mapping[str, Any]:
    """Return field metadata for a JSON key that is not a valid Python name, such as ``from``."""
    return {"key": name}


def to_plain(value: Any) -> Any:
    """Return a document as dictionaries, lists and JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        version = getattr(value, "SCHEMA_VERSION", None)
        document = {} if version is None else {_VERSION: version}
        for field in fields(value):
            item = getattr(value, field.name)
            if "optional" not in field.metadata or item != field.default:
                document[field.metadata.get("key", field.name)] = to_plain(item)
        return document
    if isinstance(value, Mapping):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(to_plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def to_json(value: Any) -> str:
    return json.dumps(to_plain(value), indent=1, sort_keys=True) + "\n"


def read(kind: type[_T], data: object) -> _T:
    """Convert parsed JSON to a document; raise DocumentError if version or structure is wrong."""
    document: _T = _read(kind, data, "")
    return document


def parse(kind: type[_T], text: str | bytes) -> _T:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"not JSON: {error}") from error
    return read(kind, data)


_hints = cache(get_type_hints)


def _read(kind: Any, data: Any, path: str) -> Any:
    if kind is Any:
        return data
    if is_dataclass(kind):
        return _read_fields(kind, data, path)
    origin = get_origin(kind)
    reader = _READERS.get(origin)
    if reader is not None:
        return reader(kind, data, path)
    allowed = (int, float) if kind is float else (kind,)
    if type(data) not in allowed:  # isinstance would accept True as a number
        raise _error(path, f"expected {kind.__name__}, got {shorten(data)}")
    return data


def _read_fields(kind: Any, data: Any, path: str) -> Any:
    data = dict(_require_type(dict, "an object", data, path))
    version = getattr(kind, "SCHEMA_VERSION", None)
    if version is not None:
        _check_literal((version,), data.pop(_VERSION, None), _join(path, _VERSION))
    fields_by_key = {field.metadata.get("key", field.name): field for field in fields(kind)}
    for name in data:
        if name not in fields_by_key:
            raise _error(_join(path, name), "unknown")
    values = {}
    for name, field in fields_by_key.items():
        if name in data:
            values[field.name] = _read(_hints(kind)[field.name], data[name], _join(path, name))
        elif "optional" not in field.metadata:
            raise _error(_join(path, name), "missing")
    try:
        return kind(**values)
    except ValueError as error:
        raise _error(path, str(error)) from error


def _read_union(kind: Any, data: Any, path: str) -> Any:
    errors = []
    for alternative in get_args(kind):
        if alternative is type(None) and data is None:
            return None
        try:
            return _read(alternative, data, path)
        except DocumentError as error:
            if alternative is not type(None):
                errors.append(str(error))
    raise DocumentError(" or ".join(errors))


def _check_literal(allowed: tuple[Any, ...], data: Any, path: str) -> Any:
    # Compare types, too: True equals 1.
    if not any(type(value) is type(data) and value == data for value in allowed):
        expected = " or ".join(map(str, allowed))
        raise _error(path, f"invalid value {shorten(data)}, expected {expected}")
    return data


def _read_tuple(kind: Any, data: Any, path: str) -> Any:
    items = _require_type(list, "a list", data, path)
    item_kinds = get_args(kind)
    if item_kinds[1:] == (...,):  # tuple[X, ...]
        item_kinds = item_kinds[:1] * len(items)
    if len(item_kinds) != len(items):
        raise _error(path, f"expected {len(item_kinds)} values, got {len(items)}")
    return tuple(
        _read(item_kind, item, f"{path}[{index}]")
        for index, (item_kind, item) in enumerate(zip(item_kinds, items, strict=True))
    )


def _read_mapping(kind: Any, data: Any, path: str) -> Any:
    value_kind = get_args(kind)[1]
    entries = _require_type(dict, "an object", data, path)
    return {name: _read(value_kind, value, _join(path, name)) for name, value in entries.items()}


_READERS: dict[Any, Callable[[Any, Any, str], Any]] = {
    Union: _read_union,
    types.UnionType: _read_union,
    Literal: lambda kind, data, path: _check_literal(get_args(kind), data, path),
    tuple: _read_tuple,
    dict: _read_mapping,
    Mapping: _read_mapping,
}


def _require_type(kind: type, type_name: str, data: Any, path: str) -> Any:
    if not isinstance(data, kind):
        raise _error(path, f"expected {type_name}, got {shorten(data)}")
    return data


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _error(path: str, message: str) -> DocumentError:
    return DocumentError(f"{path}: {message}" if path else message)


def shorten(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 40 else f"{text[:37]}..."


def check_pattern(where: str, value: str | None, pattern: str) -> None:
    """Raise DocumentError if a value does not match; ``None`` is accepted."""
    if value is not None and not re.fullmatch(pattern, value):
        raise DocumentError(f"{where}: {value!r} does not match {pattern}")


def check_plain_directory(where: str, value: str) -> None:
    path = PurePosixPath(value)
    if not path.is_absolute() or ".." in path.parts or not path.name or path.name.startswith("."):
        message = "must be an absolute path without .. or hidden names"
        raise DocumentError(f"{where}: {value!r} {message}")


def check_range(where: str, value: float, minimum: float, maximum: float = float("inf")) -> None:
    if not minimum <= value <= maximum:
        raise DocumentError(f"{where}: {value} must be between {minimum} and {maximum}")
