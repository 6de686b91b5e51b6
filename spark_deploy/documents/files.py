"""Read YAML mappings, saying where they are wrong, and our schemas.

Duplicate keys are mistakes, not overrides.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from spark_deploy.checkout import CHECKOUT
from spark_deploy.documents.plain_data import odd_values
from spark_deploy.documents.schema_check import dotted
from spark_deploy.errors import Problem

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


_DEPTH = 100


def _load(text: str) -> Any:
    """Return the plain data of a YAML text.

    Raises:
        RecursionError: it nests deeper than any settings do; the parser in C would end the process.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _DEPTH:
                raise RecursionError
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    # The loader derives from a safe one, so it builds plain data only.
    return yaml.load(text, Loader=_NoDuplicates)


def read_mapping(path: Path, *, shown: str) -> tuple[dict[str, Any], list[Problem]]:
    """Return the mapping of ``path`` (empty when it has none) and what is wrong with it."""
    try:
        data = _load(path.read_text(encoding="utf-8"))
    except OSError as error:
        return {}, [Problem(shown, f"cannot be read: {error.strerror}", "check the file")]
    except UnicodeDecodeError:
        return {}, [Problem(shown, "is not UTF-8 text", "save it as UTF-8")]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{shown} line {mark.line + 1}" if mark else shown
        what = getattr(error, "problem", None) or "is not YAML"
        return {}, [Problem(where, str(what), "correct the YAML of that line or the one above")]
    except RecursionError:
        return {}, [Problem(shown, "nests too deeply", "write fewer levels")]
    except (ValueError, OverflowError, AttributeError, KeyError) as error:
        # Of a value that PyYAML makes: a 13th month, a number of a megabyte, `!!bool maybe`.
        return {}, [Problem(shown, f"holds a value that is none: {error}", "put it in quotes")]
    if data is None:
        return {}, []
    if not isinstance(data, dict):
        what = f"holds a {type(data).__name__}, not keys and values"
        return {}, [Problem(shown, what, "write one `key: value` a line")]
    if odd := [
        Problem(f"{shown}: {dotted(path)}", what, fix) for path, what, fix in odd_values(data)
    ]:
        return {}, odd
    return data, []


def load_schema(name: str, *, checkout: Path = CHECKOUT) -> dict[str, Any]:
    """Return ``schema/<name>.schema.json`` as plain data."""
    text = (checkout / "schema" / f"{name}.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
