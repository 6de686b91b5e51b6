"""Requirements on symbols of vLLM: rows of ``rows_*.yml``, checked in syntax trees."""

# A file has ``names``, which are symbol prefixes for ``$name``, and ``rows``, grouped by the plugin
# file that uses the symbols. Parsing is strict, because unknown requirements would not be checked.

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml  # installed with vLLM, which requires it

from spark_vllm import SUPPORTED_ENGINES

SUBJECTS = ("quantization", "models", "attention", "head", "ngram")


class MissingError(LookupError):
    """A module or symbol in the table does not exist."""


class Sources:
    """The ``vllm`` package in a directory; tests replace modules with ``changed``."""

    def __init__(self, root: Path, changed: Mapping[str, ast.Module] | None = None) -> None:
        self._root = root
        self._trees = dict(changed or {})

    @staticmethod
    def files(module: str) -> tuple[str, str]:
        path = module.replace(".", "/")
        return f"{path}.py", f"{path}/__init__.py"

    def module(self, module: str) -> ast.Module:
        if module not in self._trees:
            paths = (self._root / file for file in self.files(module))
            path = next((path for path in paths if path.is_file()), None)
            if path is None:
                raise MissingError(f"module {module} is missing")
            self._trees[module] = ast.parse(path.read_text())
        return self._trees[module]

    def find(self, symbol: str) -> ast.stmt:
        module, _, qualname = symbol.partition(":")
        body: list[ast.stmt] = self.module(module).body
        for name in qualname.split("."):
            bindings = [node for node in _statements(body) if name in bound_names(node)]
            if not bindings:
                raise MissingError(f"{module} has no {qualname}")
            node = bindings[-1]  # a later definition replaces earlier ones
            body = node.body if isinstance(node, ast.ClassDef) else []
        return node


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of ``body``, including those inside ``if`` and ``try``."""
    result: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.If):
            result += _statements(node.body) + _statements(node.orelse)
        elif isinstance(node, ast.Try):
            result += _statements(node.body)
        else:
            result.append(node)
    return result


def bound_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


@dataclass(frozen=True)
class Rule:
    def problems(self, sources: Sources, symbol: str) -> Iterator[str]:
        return self._violations(sources.find(symbol))

    def _violations(self, node: ast.stmt) -> Iterator[str]:
        return iter(())


@dataclass(frozen=True)
class Exists(Rule):
    """The name is defined, assigned or imported there."""


@dataclass(frozen=True)
class Absent(Rule):
    def problems(self, sources: Sources, symbol: str) -> Iterator[str]:
        owner, _, name = symbol.rpartition(".")
        sources.find(owner)
        try:
            sources.find(symbol)
        except MissingError:
            return
        yield f"{name} exists"


@dataclass(frozen=True)
class Takes(Rule):
    """A function that can be called with these arguments.

    ``positional`` are the first parameters after ``self`` or ``cls``; other parameters that are not
    in ``keywords`` need a default.
    """

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    decorator: str | None = None  # "classmethod" or "staticmethod"

    def _violations(self, node: ast.stmt) -> Iterator[str]:
        if not isinstance(node, ast.FunctionDef):
            yield "is not a function"
            return
        decorators = {ast.unparse(item) for item in node.decorator_list}
        if self.decorator is not None and self.decorator not in decorators:
            yield f"is not a {self.decorator}"
        ordered, required = _parameters(node)
        if tuple(ordered[: len(self.positional)]) != self.positional:
            yield f"takes ({', '.join(ordered)}), but we pass ({', '.join(self.positional)})"
        accepted = {*ordered, *(item.arg for item in node.args.kwonlyargs)}
        yield from (f"does not accept {name}" for name in self.keywords if name not in accepted)
        passed = {*self.positional, *self.keywords}
        yield from (
            f"requires {name}, which we do not pass" for name in required if name not in passed
        )


def _parameters(node: ast.FunctionDef) -> tuple[list[str], list[str]]:
    ordered = [item.arg for item in (*node.args.posonlyargs, *node.args.args)]
    required = ordered[: len(ordered) - len(node.args.defaults)]
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    required += [item.arg for item, default in pairs if default is None]
    if ordered[:1] in (["self"], ["cls"]):
        return ordered[1:], required[1:]
    return ordered, required


@dataclass(frozen=True)
class Inherits(Rule):
    base: str

    def _violations(self, node: ast.stmt) -> Iterator[str]:
        bases = [ast.unparse(base) for base in getattr(node, "bases", [])]
        if self.base not in bases:
            yield f"inherits from ({', '.join(bases)}), expected {self.base}"


@dataclass(frozen=True)
class Contains(Rule):
    value: str

    def _violations(self, node: ast.stmt) -> Iterator[str]:
        constants = {item.value for item in ast.walk(node) if isinstance(item, ast.Constant)}
        if self.value not in constants:
            yield f"does not contain {self.value!r}"


@dataclass(frozen=True)
class Maps(Rule):
    """A value that contains, at any depth, a dictionary with these entries."""

    entries: tuple[tuple[str, object], ...]

    def _violations(self, node: ast.stmt) -> Iterator[str]:
        literals: dict[str, object] = {}
        for item in ast.walk(node):
            if isinstance(item, ast.Dict):
                literals.update(_literals(item))
        for key, value in self.entries:
            if key not in literals:
                yield f"lacks {key!r}"
            elif literals[key] != value:
                yield f"has {key!r}: {literals[key]!r}, expected {value!r}"


def _literals(node: ast.Dict) -> Iterator[tuple[str, object]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            try:
                yield key.value, ast.literal_eval(value)
            except ValueError:
                continue


@dataclass(frozen=True)
class Does(Rule):
    expressions: tuple[str, ...]
    expected: bool = True

    def _violations(self, node: ast.stmt) -> Iterator[str]:
        text = ast.unparse(node)
        problem = "no longer contains" if self.expected else "contains"
        for expression in self.expressions:
            if (normalize(expression) in text) is not self.expected:
                yield f"{problem} `{expression}`"


def normalize(expression: str) -> str:
    return ast.unparse(ast.parse(expression)).strip()


@dataclass(frozen=True)
class Row:
    """A symbol of vLLM, a requirement, the reason, and our file that uses it."""

    symbol: str  # "module:name.inner"
    rule: Rule
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
    """Read a table of requirements; an error names the row that is wrong."""
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
        raise ValueError("expected the keys names and rows, with a list of rows for each file")
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
    raise ValueError(f"expected the keys symbol, requires, reason, and versions (from {engines})")


def _expand_symbol(text: str, names: Mapping[str, str]) -> str:
    try:
        return Template(text).substitute(names)
    except KeyError as error:
        raise ValueError(f"unknown name {error}, expected {' or '.join(names)}") from error


def _parse_rule(requirement: Any) -> Rule:
    match requirement:
        case "exists":
            return Exists()
        case "absent":
            return Absent()
        case {"takes": positional, **rest} if rest.keys() <= {"keywords", "decorator"}:
            keywords, decorator = rest.get("keywords", []), rest.get("decorator")
            if decorator in (None, "classmethod", "staticmethod"):
                return Takes(_parse_strings(positional), _parse_strings(keywords), decorator)
        case {"inherits": str(base)} if len(requirement) == 1:
            return Inherits(base)
        case {"contains": str(value)} if len(requirement) == 1:
            return Contains(value)
        case {"maps": dict(entries)} if entries and len(requirement) == 1:
            return Maps(tuple(entries.items()))
        case {"does": [_, *_] as expressions} if len(requirement) == 1:
            return Does(_parse_strings(expressions))
        case {"does_not": [_, *_] as expressions} if len(requirement) == 1:
            return Does(_parse_strings(expressions), expected=False)
    raise ValueError(
        "expected one of the keys exists, absent, inherits, contains, maps, does, does_not, "
        "or takes (with keywords and decorator)"
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
