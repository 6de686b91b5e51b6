"""Symbols of vLLM as syntax trees, read from source files without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path


class MissingError(LookupError):
    """A module or symbol is not where the table says."""


class Sources:
    """The ``vllm`` package below one directory; modules in ``changed`` are taken from there."""

    def __init__(self, root: Path, changed: Mapping[str, ast.Module] | None = None) -> None:
        self._root = root
        self._trees = dict(changed or {})

    @staticmethod
    def files(module: str) -> tuple[str, str]:
        """Return the two files that can hold ``module``, relative to the root."""
        path = module.replace(".", "/")
        return f"{path}.py", f"{path}/__init__.py"

    def module(self, module: str) -> ast.Module:
        """Return the syntax tree of ``module``.

        Raises:
            MissingError: there is none.
        """
        if module not in self._trees:
            paths = [self._root / file for file in self.files(module)]
            found = [path for path in paths if path.is_file()]
            if not found:
                raise MissingError(f"there is no module {module}")
            self._trees[module] = ast.parse(found[0].read_text())
        return self._trees[module]

    def find(self, symbol: str) -> ast.stmt:
        """Return the statement that binds ``symbol``, spelt ``module:name.inner``.

        Raises:
            MissingError: the module or the symbol is not there.
        """
        module, _, qualname = symbol.partition(":")
        body: list[ast.stmt] = self.module(module).body
        for name in qualname.split("."):
            # The last binding wins, as it does when the module is run.
            found = [node for node in _statements(body) if name in bound_names(node)]
            if not found:
                raise MissingError(f"{module} has no {qualname}")
            body = found[-1].body if isinstance(found[-1], ast.ClassDef) else []
        return found[-1]


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return ``body`` with the branches of ``if`` and ``try`` laid out flat."""
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
