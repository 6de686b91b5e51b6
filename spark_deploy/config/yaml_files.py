"""Read YAML mappings and schemas; refuse duplicate keys and values that no document can hold."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import Problem
from spark_deploy.config.schema_errors import MAX_VALUES, dotted, unusable_values

# Ten times as fast, and every deploy and command reads the whole catalog. PyYAML's wheels have it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _NoDuplicates(_Loader):  # type: ignore[misc]
    """Safe loader that refuses a key given twice (YAML keeps the last one silently)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is a list or a mapping, not a word", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return found


class _DatesAreText(_NoDuplicates):
    """Loader for foreign documents, in which unquoted dates are text."""


_DatesAreText.add_constructor("tag:yaml.org,2002:timestamp", _DatesAreText.construct_yaml_str)


class _TooLargeError(Exception):
    """A file is larger than any settings are."""


_MAX_BYTES = 8 << 20
_MAX_EVENTS = 2 * MAX_VALUES
_MAX_YAML_LEVELS = 100


def _load(path: Path, loader: Any) -> Any:
    """Return the plain data of a YAML file.

    Raises:
        RecursionError: it nests deeper than any settings do; the parser in C would end the process.
        _TooLargeError: reading it would take minutes, or all memory.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise _TooLargeError(f"is larger than {_MAX_BYTES} bytes")
    text = data.decode("utf-8")
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if number > _MAX_EVENTS:
            raise _TooLargeError(f"holds more than {MAX_VALUES} values")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_YAML_LEVELS:
                raise RecursionError
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    # The loader derives from a safe one, so it builds plain data only.
    return yaml.load(text, Loader=loader)


def read_mapping(
    path: Path, *, shown: str, of_others: bool = False
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the mapping of ``path`` (empty when it has none) and what is wrong with it.

    Args:
        path: of the file.
        shown: how messages call it.
        of_others: a foreign document, in which a date is text.
    """
    try:
        data = _load(path, _DatesAreText if of_others else _NoDuplicates)
    except OSError as error:
        return {}, [Problem(shown, f"cannot be read: {error.strerror}", "check the file")]
    except UnicodeDecodeError:
        return {}, [Problem(shown, "is not UTF-8 text", "save it as UTF-8")]
    except yaml.YAMLError as error:
        return {}, [_no_yaml(error, path, shown)]
    except _TooLargeError as error:
        return {}, [Problem(shown, str(error), "name the file that is meant")]
    except RecursionError:
        return {}, [Problem(shown, "nests too deeply", "write fewer levels")]
    except (ValueError, OverflowError, AttributeError, KeyError) as error:
        # Of a value that PyYAML makes: a 13th month, a number of a megabyte, `!!bool maybe`.
        return {}, [Problem(shown, f"holds a value that is none: {error}", "put it in quotes")]
    if data is None:
        return {}, []
    if not isinstance(data, dict):
        message = f"holds a {type(data).__name__}, not keys and values"
        return {}, [Problem(shown, message, "write one `key: value` a line")]
    problems = [
        Problem(f"{shown}: {dotted(path)}", message, fix)
        for path, message, fix in unusable_values(data)
    ]
    return ({} if problems else data), problems


def _no_yaml(error: yaml.YAMLError, path: Path, shown: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    where = f"{shown} line {mark.line + 1}" if mark else shown
    message = str(getattr(error, "problem", None) or "is not YAML")
    if mark and "cannot start any token" in message:
        line = path.read_text(encoding="utf-8").split("\n")[mark.line]
        if line[mark.column : mark.column + 1] == "\t":
            return Problem(where, "holds a tab where YAML takes only blanks", "write blanks there")
    return Problem(where, message, "correct the YAML of that line or the one above")


def load_schema(name: str, *, checkout: Path = CHECKOUT) -> dict[str, Any]:
    """Return ``schema/<name>.schema.json`` as plain data."""
    text = (checkout / "schema" / f"{name}.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
