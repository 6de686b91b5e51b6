"""Holds a model's tensor patterns against what else its catalog file says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spark_contract.patterns import PatternError, count, expand_all

from spark_deploy.errors import CatalogError, Problem

_SETS = ("swap", "base", "mtp", "donor_unmatched")


def check_tensors(shown: str, tensors: Mapping[str, Any], *, donor: str | None) -> None:
    """Refuse patterns that cannot be read, other counts, and shapes that do not fit the swap."""
    problems = list(_unreadable(shown, tensors))
    if not problems:
        problems = [*_miscounted(shown, tensors), *_misshapen(shown, tensors, donor)]
    if problems:
        raise CatalogError(problems)


def _unreadable(shown: str, tensors: Mapping[str, Any]) -> Iterator[Problem]:
    patterns = [(key, pattern) for key in _SETS for pattern in tensors[key]]
    patterns += [("donor_shapes", shape["modules"]) for shape in tensors["donor_shapes"]]
    for key, pattern in patterns:
        try:
            count(pattern)
        except PatternError as error:
            yield Problem(f"{shown}: tensors.{key}", str(error), "correct the pattern")


def _miscounted(shown: str, tensors: Mapping[str, Any]) -> Iterator[Problem]:
    counts = tensors["counts"] or {}
    for key in _SETS:
        found = sum(map(count, tensors[key]))
        if counts and found != counts[key]:
            what = f"stands for {found} names, counts.{key} says {counts[key]}"
            fix = (
                f"correct the patterns, or the count after a look at its source: {counts['source']}"
            )
            yield Problem(f"{shown}: tensors.{key}", what, fix)


def _misshapen(shown: str, tensors: Mapping[str, Any], donor: str | None) -> Iterator[Problem]:
    where, shapes, block = (
        f"{shown}: tensors.donor_shapes",
        tensors["donor_shapes"],
        tensors["block_shape"],
    )
    if donor is not None or shapes:
        try:
            described = expand_all([shape["modules"] for shape in shapes])
        except PatternError as error:
            yield Problem(where, str(error), "describe each module once")
            return
        odd = sorted(described ^ expand_all(tensors["swap"]))
        if odd:
            what = f"describes other modules than tensors.swap names, {odd[0]} among {len(odd)}"
            yield Problem(where, what, "describe each swapped module, and no other")
    for shape in shapes:
        grid = [-(-edge // step) for edge, step in zip(shape["weight"], block, strict=True)]
        if list(shape["scale"]) != grid:
            what = f"{shape['modules']}: scale {shape['scale']} is no grid of {block} blocks"
            yield Problem(where, what, f"a weight of {shape['weight']} has scales {grid}")
