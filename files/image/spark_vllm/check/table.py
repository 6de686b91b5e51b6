"""Read ``rows_*.yml``: the upstream symbols that the plugin uses, with required properties."""

# ``names`` of a file are symbol prefixes, used as ``$name`` and in later names. Parsing is strict:
# an unknown demand would never be checked.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml  # the engine brings it: vLLM requires it

from spark_vllm import SUPPORTED_ENGINES
from spark_vllm.check import rules
from spark_vllm.check.rules import MissingError, Sources

SUBJECTS = ("quantisation", "models", "attention", "head")


@dataclass(frozen=True)
class Row:
    """A symbol of vLLM, the demand on it, the reason, and the file that uses it."""

    symbol: str  # "module:name.inner"
    rule: rules.Rule
    why: str
    used_by: str  # file of the plugin
    versions: tuple[str, ...]

    def problems(self, sources: Sources) -> Iterator[str]:
        try:
            yield from map(self.describe, self.rule.problems(sources, self.symbol))
        except MissingError as error:
            yield self.describe(str(error))

    def describe(self, problem: str) -> str:
        """Return ``problem`` with symbol, reason and the file that uses it."""
        return f"{self.symbol}: {problem}\n  needed: {self.why}\n  in: {self.used_by}"


class _Loader(yaml.SafeLoader):
    """YAML that refuses duplicate keys: a second demand would replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        content = super().construct_mapping(node, deep)
        if len(content) != len(node.value):
            raise ValueError(f"duplicate key\n{node.start_mark}")
        return content


def read_rows(path: Path) -> tuple[Row, ...]:
    where = str(path)
    try:
        match yaml.load(path.read_text(), _Loader):
            case {"names": dict(beginnings), "rows": [*entries], **rest} if not rest:
                names: dict[str, str] = {}
                for name, beginning in beginnings.items():
                    names[name] = _symbol(beginning, names)
                rows = []
                for number, entry in enumerate(entries, 1):
                    where = f"{path}: row {number}: {entry}"
                    rows.append(_row(entry, names))
                return tuple(rows)
        raise ValueError("accepted: a mapping of names, and a list of rows")
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}; fix: write it like the other rows") from error


def _row(entry: Any, names: Mapping[str, str]) -> Row:
    match entry:
        case {"symbol": str(symbol), "demand": demand, "why": str(why), "used_by": str(by), **rest}:
            versions = tuple(entry.get("versions", SUPPORTED_ENGINES))
            known = bool(versions) and {*versions} <= {*SUPPORTED_ENGINES}
            if known and rest.keys() <= {"versions"}:
                return Row(_symbol(symbol, names), _rule(demand), why, by, versions)
    engines = ", ".join(SUPPORTED_ENGINES)
    raise ValueError(f"accepted: symbol, demand, why, used_by, and versions of {engines}")


def _symbol(text: str, names: Mapping[str, str]) -> str:
    try:
        return Template(text).substitute(names)
    except KeyError as error:
        raise ValueError(f"accepted names: {', '.join(names)}") from error


def _rule(demand: Any) -> rules.Rule:
    match demand:
        case "exists":
            return rules.Exists()
        case "absent":
            return rules.Absent()
        case {"takes": positional, **rest} if rest.keys() <= {"keywords", "decorator"}:
            keywords, decorator = rest.get("keywords", []), rest.get("decorator")
            if decorator in (None, "classmethod", "staticmethod"):
                return rules.Takes(_words(positional), _words(keywords), decorator)
        case {"inherits": str(base)} if len(demand) == 1:
            return rules.Inherits(base)
        case {"contains": str(value)} if len(demand) == 1:
            return rules.Contains(value)
        case {"maps": dict(entries)} if entries and len(demand) == 1:
            return rules.Maps(tuple(entries.items()))
        case {"does": [_, *_] as expressions} if len(demand) == 1:
            return rules.Does(_words(expressions))
        case {"does_not": [_, *_] as expressions} if len(demand) == 1:
            return rules.DoesNot(_words(expressions))
    raise ValueError(
        "accepted demands: exists, absent, inherits, contains, maps, does, does_not, "
        "and takes with keywords and decorator"
    )


def _words(items: Any) -> tuple[str, ...]:
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{items}: accepted: a list of strings")
    return tuple(items)


TABLE = tuple(
    row
    for subject in SUBJECTS
    for row in read_rows(Path(__file__).with_name(f"rows_{subject}.yml"))
)


def rows_for(version: str) -> list[Row]:
    """Return the rows that apply to engine ``version``."""
    return [row for row in TABLE if version in row.versions]


def table_problems(sources: Sources, version: str) -> list[str]:
    """Return all differences between ``sources`` and the table."""
    return [problem for row in rows_for(version) for problem in row.problems(sources)]
