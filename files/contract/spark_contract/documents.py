"""Documents: frozen dataclasses as plain JSON data, with one reader and one writer for all.

A document's keys are the fields of its class. Reading is strict: a key too many, one too few or a
value of another type is refused with the path of the key (``engine.mounts[0].source: missing``).
A class with a ``SCHEMA_VERSION`` (``ClassVar[int]``) is written with it as ``schema_version``, and
the reader requires it.

Numbers keep the form they have, so what was read is written back byte for byte.
"""

from __future__ import annotations

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
    """Data is not the document it is read as; the text begins with the path of the key."""


OPTIONAL: Mapping[str, Any] = {"optional": True}
"""``field(default=..., metadata=OPTIONAL)``: the key is left out while it has its default."""


def key(name: str) -> Mapping[str, Any]:
    """Return the metadata of a field whose key cannot be a name in Python, such as ``from``."""
    return {"key": name}


def plain(value: Any) -> Any:
    """Return a document, or a part of one, as plain JSON data: the one writer."""
    if is_dataclass(value) and not isinstance(value, type):
        version = getattr(value, "SCHEMA_VERSION", None)
        stated = {} if version is None else {_VERSION: version}
        items = ((one, getattr(value, one.name)) for one in fields(value))
        return stated | {
            one.metadata.get("key", one.name): plain(item)
            for one, item in items
            if not ("optional" in one.metadata and item == one.default)
        }
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def text_of(value: Any) -> str:
    """Return a document as the text of its file: sorted keys, one a line."""
    return json.dumps(plain(value), indent=1, sort_keys=True) + "\n"


def read(kind: type[_T], data: object) -> _T:
    """Return plain data as a document: the one reader.

    Raises:
        DocumentError: The data is of another version, or not that document at all.
    """
    found: _T = _read(kind, data, "")
    return found


def parse(kind: type[_T], text: str) -> _T:
    """Return the document in a JSON text; see :func:`read`."""
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
    wanted = (int, float) if kind is float else (kind,)
    if type(data) not in wanted:  # not isinstance: True is no number
        raise _wrong(path, f"{kind.__name__} expected, not {shown(data)}")
    return data


def _read_fields(kind: Any, data: Any, path: str) -> Any:
    data = dict(_of(dict, "an object", data, path))
    version = getattr(kind, "SCHEMA_VERSION", None)
    if version is not None:
        _one_of((version,), data.pop(_VERSION, None), _at(path, _VERSION))
    known = {one.metadata.get("key", one.name): one for one in fields(kind)}
    for name in data:
        if name not in known:
            raise _wrong(_at(path, name), "unknown")
    values = {}
    for name, one in known.items():
        if name in data:
            values[one.name] = _read(_hints(kind)[one.name], data[name], _at(path, name))
        elif "optional" not in one.metadata:
            raise _wrong(_at(path, name), "missing")
    try:
        return kind(**values)
    except ValueError as error:  # a rule of the class itself
        raise _wrong(path, str(error)) from error


def _read_union(kind: Any, data: Any, path: str) -> Any:
    """Of several documents the one with these keys is meant, of other types the first that fits."""
    refused = []
    for one in get_args(kind):
        try:
            return None if one is type(None) and data is None else _read(one, data, path)
        except DocumentError as error:
            if one is not type(None):
                refused.append(str(error))
    raise DocumentError(refused[0] if len(refused) == 1 else " or ".join(refused))


def _one_of(known: tuple[Any, ...], data: Any, path: str) -> Any:
    # Not `in`: True would be 1.
    if not any(type(one) is type(data) and one == data for one in known):
        raise _wrong(path, f"{shown(data)}, known: {', '.join(map(str, known))}")
    return data


def _read_tuple(kind: Any, data: Any, path: str) -> Any:
    items, parts = _of(list, "a list", data, path), get_args(kind)
    if parts[1:] == (...,):
        parts = parts[:1] * len(items)
    if len(parts) != len(items):
        raise _wrong(path, f"{len(parts)} values expected, not {len(items)}")
    pairs = enumerate(zip(parts, items, strict=True))
    return tuple(_read(part, item, f"{path}[{number}]") for number, (part, item) in pairs)


def _read_frozenset(kind: Any, data: Any, path: str) -> Any:
    (part,) = get_args(kind)
    items = enumerate(_of(list, "a list", data, path))
    return frozenset(_read(part, item, f"{path}[{number}]") for number, item in items)


def _read_mapping(kind: Any, data: Any, path: str) -> Any:
    item = get_args(kind)[1]
    pairs = _of(dict, "an object", data, path).items()
    return {name: _read(item, one, _at(path, name)) for name, one in pairs}


_READERS: dict[Any, Callable[[Any, Any, str], Any]] = {
    Union: _read_union,
    types.UnionType: _read_union,
    Literal: lambda kind, data, path: _one_of(get_args(kind), data, path),
    tuple: _read_tuple,
    frozenset: _read_frozenset,
    dict: _read_mapping,
    Mapping: _read_mapping,
}


def _of(kind: type, called: str, data: Any, path: str) -> Any:
    if not isinstance(data, kind):
        raise _wrong(path, f"{called} expected, not {shown(data)}")
    return data


def _at(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _wrong(path: str, what: str) -> DocumentError:
    return DocumentError(f"{path}: {what}" if path else what)


def shown(data: object) -> str:
    """Return a value as a message shows it."""
    text = repr(data)
    return text if len(text) <= 40 else f"{text[:37]}..."


def of_form(where: str, value: str | None, pattern: str) -> None:
    """Refuse a text that does not match; None is left out, and right."""
    if value is not None and not re.fullmatch(pattern, value):
        raise DocumentError(f"{where}: {value!r} is not of the form {pattern}")


def plain_directory(where: str, value: str) -> None:
    """Refuse what is no absolute path of a folder to make."""
    path = PurePosixPath(value)
    if not path.is_absolute() or ".." in path.parts or not path.name or path.name.startswith("."):
        raise DocumentError(f"{where}: {value!r} is not a plain absolute path")


def in_range(where: str, value: float, least: float, most: float = float("inf")) -> None:
    """Refuse a number outside of its limits."""
    if not least <= value <= most:
        raise DocumentError(f"{where}: {value} is not from {least} to {most}")
