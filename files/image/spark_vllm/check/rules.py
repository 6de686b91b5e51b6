"""What can be demanded of one symbol; each rule answers with what is wrong, or nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from spark_vllm.check.sources import MissingError, Sources


@dataclass(frozen=True)
class Rule:
    def problems(self, sources: Sources, symbol: str) -> Iterator[str]:
        """Yield what is wrong with ``symbol``.

        Raises:
            MissingError: it is not there.
        """
        return self._wrong(sources.find(symbol))

    def _wrong(self, node: ast.stmt) -> Iterator[str]:
        return iter(())


@dataclass(frozen=True)
class Exists(Rule):
    """The name is bound there: defined, assigned or imported."""


@dataclass(frozen=True)
class Absent(Rule):
    def problems(self, sources: Sources, symbol: str) -> Iterator[str]:
        owner, _, name = symbol.rpartition(".")
        sources.find(owner)
        try:
            sources.find(symbol)
        except MissingError:
            return
        yield f"{name} is there now"


@dataclass(frozen=True)
class Takes(Rule):
    """A function that can be called with these arguments.

    ``positional`` are the first parameters, in this order; ``keywords`` may stand anywhere. Every
    other parameter must have a default. ``self`` and ``cls`` are left out.
    """

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    decorator: str | None = None  # "classmethod" or "staticmethod"

    def _wrong(self, node: ast.stmt) -> Iterator[str]:
        if not isinstance(node, ast.FunctionDef):
            yield "is no function"
            return
        decorators = {ast.unparse(item) for item in node.decorator_list}
        if self.decorator is not None and self.decorator not in decorators:
            yield f"is no {self.decorator}"
        ordered, required = _parameters(node)
        if tuple(ordered[: len(self.positional)]) != self.positional:
            yield f"takes ({', '.join(ordered)}), we pass ({', '.join(self.positional)})"
        taken = {*ordered, *(item.arg for item in node.args.kwonlyargs)}
        yield from (f"takes no {name}" for name in self.keywords if name not in taken)
        ours = {*self.positional, *self.keywords}
        yield from (
            f"requires {name}, which we do not pass" for name in required if name not in ours
        )


def _parameters(node: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """Return the parameters that have a place, and all without a default; not ``self``."""
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

    def _wrong(self, node: ast.stmt) -> Iterator[str]:
        bases = [ast.unparse(base) for base in getattr(node, "bases", [])]
        if self.base not in bases:
            yield f"has the bases ({', '.join(bases)}), not {self.base}"


@dataclass(frozen=True)
class Contains(Rule):
    value: str

    def _wrong(self, node: ast.stmt) -> Iterator[str]:
        found = {item.value for item in ast.walk(node) if isinstance(item, ast.Constant)}
        if self.value not in found:
            yield f"has no {self.value!r}"


@dataclass(frozen=True)
class Maps(Rule):
    """A constant holding a dictionary with these entries, wherever it stands in the value."""

    entries: tuple[tuple[str, object], ...]

    def _wrong(self, node: ast.stmt) -> Iterator[str]:
        found: dict[str, object] = {}
        for item in ast.walk(node):
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
class Does(Rule):
    """Source that contains these expressions, however it is laid out."""

    expressions: tuple[str, ...]

    def _wrong(self, node: ast.stmt) -> Iterator[str]:
        text = ast.unparse(node)
        absent = (one for one in self.expressions if normal(one) not in text)
        yield from (f"does not say `{one}` any more" for one in absent)


@dataclass(frozen=True)
class DoesNot(Rule):
    expressions: tuple[str, ...]

    def _wrong(self, node: ast.stmt) -> Iterator[str]:
        text = ast.unparse(node)
        yield from (f"says `{one}` now" for one in self.expressions if normal(one) in text)


def normal(expression: str) -> str:
    """Return ``expression`` as ``ast.unparse`` lays it out."""
    return ast.unparse(ast.parse(expression)).strip()
