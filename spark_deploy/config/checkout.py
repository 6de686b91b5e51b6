"""Paths of the checkout, of catalog files and of the cache, and a reader for YAML files.

An installed wheel contains the parts of the checkout that a deploy needs, in the same layout.
"""

import json
import os
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from spark_deploy.config.errors import Problem
from spark_deploy.config.schema_errors import MAX_VALUES, dotted, unusable_values

_PACKAGE = Path(__file__).resolve().parent.parent
_IN_WHEEL = _PACKAGE / "_checkout"
CHECKOUT = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent


def cache_folder() -> Path:
    """Return the user's cache folder, or a temporary folder if that is not writable."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spark-deploy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK)
    except OSError:
        is_writable = False
    return folder if is_writable else Path(tempfile.mkdtemp(prefix="spark-deploy-"))


def catalog_files(
    kind: str, *, checkout: Path = CHECKOUT, user_dir: Path | None = None
) -> dict[str, Path]:
    """Return the files by name, sorted; files in ``user_dir`` replace shipped files."""
    folders = [checkout]
    if user_dir is not None and user_dir.resolve() != checkout.resolve():
        folders.append(user_dir)
    files = {
        path.stem: path
        for folder in folders
        for path in sorted((folder / "catalog" / kind).glob("*.yml"))
    }
    return dict(sorted(files.items()))


# The C loader is ten times as fast, and every command reads the whole catalog.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _NoDuplicates(_Loader):  # type: ignore[misc]
    """Safe loader that rejects duplicate keys; PyYAML would keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is a list or a mapping, not text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """Return base-60 numbers as text: 22:00 means a time, and long ones take long to parse."""
        if ":" in node.value:
            return self.construct_scalar(node)
        is_int = node.tag.endswith(":int")
        return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)


for _kind in ("int", "float"):
    _NoDuplicates.add_constructor(f"tag:yaml.org,2002:{_kind}", _NoDuplicates.construct_number)


class _DatesAreText(_NoDuplicates):
    """Loader for third-party documents, in which unquoted dates are text."""


_DatesAreText.add_constructor("tag:yaml.org,2002:timestamp", _DatesAreText.construct_yaml_str)


class _TooLargeError(Exception):
    pass


_MAX_BYTES = 8 << 20
_MAX_EVENTS = 2 * MAX_VALUES
_MAX_YAML_LEVELS = 100


def _load(path: Path, loader: Any) -> Any:
    """Return the plain data of a YAML file; reject a file that would crash or stall the parser."""
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise _TooLargeError(f"the file is larger than {_MAX_BYTES} bytes")
    text = data.decode("utf-8")
    depth = 0
    for event_count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if event_count > _MAX_EVENTS:
            raise _TooLargeError(f"the file has more than {MAX_VALUES} values")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_YAML_LEVELS:
                raise RecursionError
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    # The loader is safe: it builds plain data only.
    return yaml.load(text, Loader=loader)


def read_mapping(
    path: Path, *, label: str, is_foreign: bool = False
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the mapping in a YAML file (empty if it has none), and the file's problems.

    ``label`` is the file's name in messages. Dates in third-party files (``is_foreign``) stay text.
    """
    try:
        data = _load(path, _DatesAreText if is_foreign else _NoDuplicates)
    except OSError as error:
        return {}, [Problem(label, f"cannot be read: {error.strerror}", "check the file")]
    except UnicodeDecodeError:
        return {}, [Problem(label, "is not UTF-8 text", "save it as UTF-8")]
    except yaml.YAMLError as error:
        return {}, [_yaml_problem(error, path, label)]
    except _TooLargeError as error:
        return {}, [Problem(label, str(error), "use a smaller file, or check its path")]
    except RecursionError:
        return {}, [Problem(label, "nests too deeply", "write fewer levels")]
    except (ValueError, OverflowError, AttributeError, KeyError) as error:
        # PyYAML cannot convert some values: a 13th month, a number of a megabyte, `!!bool maybe`.
        return {}, [Problem(label, f"the file has an invalid value: {error}", "put it in quotes")]
    if data is None:
        return {}, []
    if not isinstance(data, dict):
        message = f"the file contains a {type(data).__name__}, not keys and values"
        return {}, [Problem(label, message, "write `key: value` on each line")]
    problems = [
        Problem(f"{label}: {dotted(path)}", message, fix)
        for path, message, fix in unusable_values(data)
    ]
    return ({} if problems else data), problems


def _yaml_problem(error: yaml.YAMLError, path: Path, label: str) -> Problem:
    """Describe a syntax error; replace PyYAML's message about tabs."""
    mark = getattr(error, "problem_mark", None)
    where = f"{label} line {mark.line + 1}" if mark else label
    message = str(getattr(error, "problem", None) or "is not YAML")
    if mark and "cannot start any token" in message:
        line = path.read_text(encoding="utf-8").split("\n")[mark.line]
        if line[mark.column : mark.column + 1] == "\t":
            return Problem(
                where, "the line has a tab where YAML accepts only spaces", "write spaces"
            )
    return Problem(where, message, "correct the YAML in that line or the line above")


def load_schema(name: str, *, checkout: Path = CHECKOUT) -> dict[str, Any]:
    text = (checkout / "schema" / f"{name}.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
