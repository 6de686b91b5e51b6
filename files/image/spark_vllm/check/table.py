"""Read ``rows_*.yml``: the upstream symbols that the plugin uses, with required properties."""

# A file has ``names``, which are symbol prefixes for ``$name``, and ``rows``, grouped by the plugin
# file that uses the symbols. Parsing is strict, because unknown requirements would not be checked.

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

SUBJECTS = ("quantization", "models", "attention", "head", "ngram")


@dataclass(frozen=True)
class Row:
    """A symbol of vLLM, a requirement, the reason, and our file that uses it."""

    symbol: str  # "module:name.inner"
    rule: rules.Rule
    reason: str
    used_by: str  # file of the plugin
    versions: tuple[str, ...]

    def problems(self, sources: Sources) -> Iterator[str]:
        try:
            yield from map(self.describe, self.rule.problems(sources, self.symbol))
        except MissingError as error:
            yield self.describe(str(error))

    def describe(self, problem: str) -> str:
        return f"{self.symbol}: {problem}\n  reason: {self.reason}\n  in: {self.used_by}"


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys, because a second requirement would replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        content = super().construct_mapping(node, deep)
        if len(content) != len(node.value):
            raise ValueError(f"duplicate key\n{node.start_mark}")
        return content


def read_rows(path: Path) -> tuple[Row, ...]:
    where = str(path)
    try:
        match yaml.load(path.read_text(), _Loader):
            case {"names": dict(prefixes), "rows": dict(files), **rest} if not rest:
                names: dict[str, str] = {}
                for name, prefix in prefixes.items():
                    names[name] = _expand_symbol(prefix, names)
                rows = []
                for file, entries in files.items():
                    for number, entry in enumerate(entries, 1):
                        where = f"{path}: {file}: row {number}: {entry}"
                        rows.append(_parse_row(entry, file, names))
                return tuple(rows)
        raise ValueError("expected names, and rows for each file")
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}; fix: use the format of the other rows") from error


def _parse_row(entry: Any, file: str, names: Mapping[str, str]) -> Row:
    match entry:
        case {"symbol": str(symbol), "requires": requirement, "reason": str(reason), **rest}:
            versions = tuple(entry.get("versions", SUPPORTED_ENGINES))
            are_supported = bool(versions) and {*versions} <= {*SUPPORTED_ENGINES}
            if are_supported and rest.keys() <= {"versions"}:
                name, rule = _expand_symbol(symbol, names), _parse_rule(requirement)
                return Row(name, rule, reason, file, versions)
    engines = ", ".join(SUPPORTED_ENGINES)
    raise ValueError(f"expected symbol, requires, reason, and versions from {engines}")


def _expand_symbol(text: str, names: Mapping[str, str]) -> str:
    try:
        return Template(text).substitute(names)
    except KeyError as error:
        raise ValueError(f"unknown name {error}, expected {' or '.join(names)}") from error


def _parse_rule(requirement: Any) -> rules.Rule:
    match requirement:
        case "exists":
            return rules.Exists()
        case "absent":
            return rules.Absent()
        case {"takes": positional, **rest} if rest.keys() <= {"keywords", "decorator"}:
            keywords, decorator = rest.get("keywords", []), rest.get("decorator")
            if decorator in (None, "classmethod", "staticmethod"):
                return rules.Takes(_parse_strings(positional), _parse_strings(keywords), decorator)
        case {"inherits": str(base)} if len(requirement) == 1:
            return rules.Inherits(base)
        case {"contains": str(value)} if len(requirement) == 1:
            return rules.Contains(value)
        case {"maps": dict(entries)} if entries and len(requirement) == 1:
            return rules.Maps(tuple(entries.items()))
        case {"does": [_, *_] as expressions} if len(requirement) == 1:
            return rules.Does(_parse_strings(expressions))
        case {"does_not": [_, *_] as expressions} if len(requirement) == 1:
            return rules.DoesNot(_parse_strings(expressions))
    raise ValueError(
        "expected exists, absent, inherits, contains, maps, does, does_not, "
        "or takes with keywords and decorator"
    )


def _parse_strings(items: Any) -> tuple[str, ...]:
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"expected a list of strings, got {items!r}")
    return tuple(items)


TABLE = tuple(
    row
    for subject in SUBJECTS
    for row in read_rows(Path(__file__).with_name(f"rows_{subject}.yml"))
)


def rows_for(version: str) -> list[Row]:
    return [row for row in TABLE if version in row.versions]


def check_table(sources: Sources, version: str) -> list[str]:
    return [problem for row in rows_for(version) for problem in row.problems(sources)]
