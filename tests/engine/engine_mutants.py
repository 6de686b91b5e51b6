from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from spark_vllm.check.rules import (
    Absent,
    Contains,
    Does,
    Inherits,
    Maps,
    MissingError,
    Row,
    Sources,
    Takes,
    bound_names,
    normalize,
)


class Mutant:
    def __init__(self, root: Path, row: Row) -> None:
        self.row = row
        self.module, _, self.qualname = row.symbol.partition(":")
        self._sources = Sources(root)
        self.tree = self._sources.module(self.module)

    def find(self) -> ast.stmt:
        return self._sources.find(self.row.symbol)

    def owner(self) -> ast.ClassDef:
        node = self._sources.find(self.row.symbol.rpartition(".")[0])
        assert isinstance(node, ast.ClassDef)
        return node

    def sources(self, root: Path) -> Sources:
        return Sources(root, {self.module: self.tree})


def rename_symbol(mutant: Mutant) -> None:
    name = mutant.qualname.rpartition(".")[2]
    while True:
        try:
            node = mutant.find()
        except MissingError:
            return
        assert name in bound_names(node)
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            node.name = f"{name}_renamed"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if name in (alias.name, alias.asname):
                    alias.name, alias.asname = f"{alias.name}_renamed", None
        else:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    target.id = f"{name}_renamed"


Mutation = Callable[[Mutant], None]


class Replace(ast.NodeTransformer):
    def __init__(self, text: str) -> None:
        self.text = text

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.alias):
            if node.name == self.text:
                node.name = "changed_upstream"
            return node
        if isinstance(node, ast.expr | ast.stmt) and ast.unparse(node).strip() == self.text:
            name = ast.Name("changed_upstream", ast.Load())
            return name if isinstance(node, ast.expr) else ast.Expr(name)
        return self.generic_visit(node)


def without(expression: str) -> Mutation:
    def mutate(mutant: Mutant) -> None:
        Replace(normalize(expression)).visit(mutant.find())
        ast.fix_missing_locations(mutant.tree)

    return mutate


def with_expression(expression: str) -> Mutation:
    def mutate(mutant: Mutant) -> None:
        node = mutant.find()
        assert isinstance(node, ast.FunctionDef)
        node.body.append(ast.parse(expression).body[0])

    return mutate


def with_member(mutant: Mutant) -> None:
    name = mutant.qualname.rpartition(".")[2]
    mutant.owner().body.append(ast.parse(f"{name} = True").body[0])


def function(mutant: Mutant) -> ast.FunctionDef:
    node = mutant.find()
    assert isinstance(node, ast.FunctionDef)
    return node


def parameter_renamed(name: str) -> Mutation:
    def mutate(mutant: Mutant) -> None:
        arguments = function(mutant).args
        for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if item.arg == name:
                item.arg = f"{name}_renamed"

    return mutate


def parameters_swapped(mutant: Mutant) -> None:
    ordered = function(mutant).args.args
    first = 1 if ordered[0].arg in ("self", "cls") else 0
    ordered[first].arg, ordered[first + 1].arg = ordered[first + 1].arg, ordered[first].arg


def parameter_required(mutant: Mutant) -> None:
    arguments = function(mutant).args
    arguments.kwonlyargs.append(ast.arg("required_upstream"))
    arguments.kw_defaults.append(None)


def undecorated(mutant: Mutant) -> None:
    function(mutant).decorator_list = []


def without_base(mutant: Mutant) -> None:
    node = mutant.find()
    assert isinstance(node, ast.ClassDef)
    node.bases = []


def constant_flipped(value: object) -> Mutation:
    def mutate(mutant: Mutant) -> None:
        for item in ast.walk(mutant.find()):
            if isinstance(item, ast.Constant) and item.value == value:
                item.value = "changed upstream"

    return mutate


def entry_flipped(key: str) -> Mutation:
    def mutate(mutant: Mutant) -> None:
        for item in ast.walk(mutant.find()):
            if isinstance(item, ast.Dict):
                for position, name in enumerate(item.keys):
                    if isinstance(name, ast.Constant) and name.value == key:
                        item.values[position] = ast.Constant("changed upstream")

    return mutate


def _mutate_takes(rule: Takes) -> Iterator[tuple[str, Mutation]]:
    for name in (*rule.positional, *rule.keywords):
        yield f"{name} renamed", parameter_renamed(name)
    if len(rule.positional) > 1:
        yield "order changed", parameters_swapped
    if rule.decorator is not None:
        yield f"no {rule.decorator}", undecorated
    yield "another required parameter", parameter_required


def _mutate_rule(rule: object) -> Iterator[tuple[str, Mutation]]:
    match rule:
        case Takes():
            yield from _mutate_takes(rule)
        case Inherits():
            yield "no base", without_base
        case Contains(value):
            yield "constant flipped", constant_flipped(value)
        case Maps(entries):
            yield from ((f"{key} flipped", entry_flipped(key)) for key, _ in entries)
        case Does(expressions, True):
            yield from ((f"without {text}", without(text)) for text in expressions)
        case Does(expressions):
            yield from ((f"with {text}", with_expression(text)) for text in expressions)


def mutations(row: Row) -> Iterator[tuple[str, Mutation]]:
    if isinstance(row.rule, Absent):
        yield "appears", with_member
        return
    yield "renamed", rename_symbol
    yield from _mutate_rule(row.rule)
