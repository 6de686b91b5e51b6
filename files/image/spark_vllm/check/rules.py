"""What can be demanded of one symbol; each rule answers with what is wrong, or nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from spark_vllm.check.sources import MissingError, Sources


class Rule(Protocol):
    """One demand on one symbol."""

    def problems(self, sources: Sources, symbol: str) -> Iterator[str]:
        """Yield what is wrong with ``symbol``."""


@dataclass(frozen=True)
class Exists:
    """The name is bound there: defined, assigned or imported."""

    def problems(self, sources: Sources, symbol: str) -> Iterator[str]:
        """Yield nothing: finding the symbol is the demand."""
        sources.find(symbol)
        yield from ()


@dataclass(frozen=True)
class Absent:
    """The name is not bound there."""

    def problems(self, sources: Sources, symbol: str) -> Iterator[str]:
        """Yield a line when the symbol is there."""
        owner, _, name = symbol.rpartition(".")
        sources.find(owner)
        try:
            sources.find(symbol)
        except MissingError:
            return
        yield f"{name} is there now"


@dataclass(frozen=True)
class Takes:
    """A function that can be called with these arguments.

    ``positional`` are the first parameters, in this order; ``keywords`` may stand anywhere. Every
    other parameter must have a default. ``self`` and ``cls`` are left out.
    """

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    decorator: str | None = None  # "classmethod" or "staticmethod"

    def problems(self, sources: Sources, symbol: str) -> Iterator[str]:
        """Yield what keeps our call from working."""
        node = sources.find(symbol)
        if not isinstance(node, ast.FunctionDef):
            yield "is no function"
            return
        decorators = {ast.unparse(item) for item in node.decorator_list}
        if self.decorator is not None and self.decorator not in decorators:
            yield f"is no {self.decorator}"
        ordered = [item.arg for item in (*node.args.posonlyargs, *node.args.args)]
        if ordered[:1] in (["self"], ["cls"]):
            ordered = ordered[1:]
        if tuple(ordered[: len(self.positional)]) != self.positional:
            yield f"takes ({', '.join(ordered)}), we pass ({', '.join(self.positional)})"
        keyword_only = [item.arg for item in node.args.kwonlyargs]
        ours = {*self.positional, *self.keywords}
        for name in self.keywords:
            if name not in ordered and name not in keyword_only:
                yield f"takes no {name}"
        for name in _required(node):
            if name not in ours:
                yield f"requires {name}, which we do not pass"


def _required(node: ast.FunctionDef) -> list[str]:
    ordered = [item.arg for item in (*node.args.posonlyargs, *node.args.args)]
    without_default = ordered[: len(ordered) - len(node.args.defaults)]
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    required = without_default + [item.arg for item, default in pairs if default is None]
    return [name for name in required if name not in ("self", "cls")]


@dataclass(frozen=True)
class Inherits:
    """A class that names this base itself."""

    base: str

    def problems(self, sources: Sources, symbol: str) -> Iterator[str]:
        """Yield a line when the base is not among the class's own."""
        node = sources.find(symbol)
        bases = [ast.unparse(base) for base in getattr(node, "bases", [])]
        if self.base not in bases:
            yield f"has the bases ({', '.join(bases)}), not {self.base}"


@dataclass(frozen=True)
class Contains:
    """A constant with this text, number or name somewhere in its value."""

    value: str

    def problems(self, sources: Sources, symbol: str) -> Iterator[str]:
        """Yield a line when the value is not in the constant."""
        node = sources.find(symbol)
        found = {item.value for item in ast.walk(node) if isinstance(item, ast.Constant)}
        if self.value not in found:
            yield f"has no {self.value!r}"


@dataclass(frozen=True)
class Maps:
    """A constant holding a dictionary with these entries, wherever it stands in the value."""

    entries: tuple[tuple[str, object], ...]

    def problems(self, sources: Sources, symbol: str) -> Iterator[str]:
        """Yield each entry that is missing or has another value."""
        found: dict[str, object] = {}
        for item in ast.walk(sources.find(symbol)):
            if isinstance(item, ast.Dict):
                found.update(_literals(item))
        for key, value in self.entries:
            if key not in found:
                yield f"has no {key!r}"
            elif found[key] != value:
                yield f"has {key!r}: {found[key]!r}, not {value!r}"


def _literals(node: ast.Dict) -> Iterator[tuple[str, object]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            try:
                yield key.value, ast.literal_eval(value)
            except ValueError:
                continue


@dataclass(frozen=True)
class Does:
    """Source that contains these expressions, however it is laid out."""

    expressions: tuple[str, ...]

    def problems(self, sources: Sources, symbol: str) -> Iterator[str]:
        """Yield each expression that is not there any more."""
        text = ast.unparse(sources.find(symbol))
        for expression in self.expressions:
            if normal(expression) not in text:
                yield f"does not say `{expression}` any more"


@dataclass(frozen=True)
class DoesNot:
    """Source that contains none of these expressions."""

    expressions: tuple[str, ...]

    def problems(self, sources: Sources, symbol: str) -> Iterator[str]:
        """Yield each expression that is there now."""
        text = ast.unparse(sources.find(symbol))
        for expression in self.expressions:
            if normal(expression) in text:
                yield f"says `{expression}` now"


def normal(expression: str) -> str:
    """Return ``expression`` as ``ast.unparse`` lays it out."""
    return ast.unparse(ast.parse(expression)).strip()
