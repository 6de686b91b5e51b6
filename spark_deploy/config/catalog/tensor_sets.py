"""Exact sets of tensor names as patterns, checked against counts and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from spark_contract.orders import PatternError, count, expand_all

from spark_deploy.config.documents import CLOSED, UNIQUE, Text, Violation

_SETS = ("swap", "base", "mtp", "donor_unmatched")

_Edge = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class DonorShape:
    """Shapes of some swapped modules in the FP8 source."""

    modules: Text = Field(description="Pattern of swapped modules with this shape.")
    weight: tuple[_Edge, _Edge] = Field(description="Rows and columns of the FP8 weight.")
    scale: tuple[_Edge, _Edge] = Field(description="Rows and columns of the grid of block scales.")
    source: Text = Field(description="Where these numbers are from.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Counts:
    """Number of names in each set, counted or computed."""

    base: int = Field(ge=0, description="Tensors of the base without MTP.")
    mtp: int = Field(ge=0, description="Tensors of the drafter.")
    swap: int = Field(ge=0, description="Modules swapped.")
    donor_unmatched: int = Field(ge=0, description="Donor tensors without a partner.")
    source: Text = Field(description="Who counted, or how it was computed.")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Tensors:
    """Exact sets of names as patterns with shell braces, expanded exactly and compared as sets."""

    swap: tuple[Text, ...] = Field(json_schema_extra=UNIQUE)
    """Modules whose weight comes from the FP8 source."""
    block_shape: tuple[_Edge, _Edge] = (128, 128)
    """Rows and columns per FP8 scale."""
    base: tuple[Text, ...] = Field(min_length=1, json_schema_extra=UNIQUE)
    """Tensors of the base without MTP."""
    mtp: tuple[Text, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """Tensors of the drafter in the base."""
    donor_unmatched: tuple[Text, ...] = Field(default=(), json_schema_extra=UNIQUE)
    """Donor tensors outside the routed experts that the base stores in another form."""
    donor_shapes: tuple[DonorShape, ...] = ()
    """Shapes of every swapped module, compared with the headers before the download."""
    counts: Counts | None = None
    """Expected number of names in each set; null if nobody counted."""

    def broken(self, *, donor: str | None) -> Iterator[Violation]:
        problems = list(self._unreadable())
        yield from problems
        if not problems:
            yield from self._miscounted()
            yield from self._misshapen(donor)

    def _unreadable(self) -> Iterator[Violation]:
        patterns = [(key, pattern) for key in _SETS for pattern in getattr(self, key)]
        patterns += [("donor_shapes", shape.modules) for shape in self.donor_shapes]
        for key, pattern in patterns:
            try:
                count(pattern)
            except PatternError as error:
                yield Violation((key,), f"{pattern!r}: {error.what}", error.fix)

    def _miscounted(self) -> Iterator[Violation]:
        if self.counts is None:
            return
        for key in _SETS:
            actual, expected = sum(map(count, getattr(self, key))), getattr(self.counts, key)
            if actual != expected:
                source = self.counts.source
                fix = f"correct the patterns, or the count after a look at its source: {source}"
                message = f"stands for {actual} names, counts.{key} says {expected}"
                yield Violation((key,), message, fix)

    def _misshapen(self, donor: str | None) -> Iterator[Violation]:
        where = ("donor_shapes",)
        if donor is not None or self.donor_shapes:
            try:
                described = expand_all([shape.modules for shape in self.donor_shapes])
            except PatternError as error:
                yield Violation(where, f"{error.where} {error.what}", "describe each module once")
                return
            odd = sorted(described ^ expand_all(self.swap))
            if odd:
                message = (
                    f"describes other modules than tensors.swap names, {odd[0]} among {len(odd)}"
                )
                yield Violation(where, message, "describe each swapped module, and no other")
        for shape in self.donor_shapes:
            edges = zip(shape.weight, self.block_shape, strict=True)
            grid = [-(-edge // step) for edge, step in edges]
            if list(shape.scale) != grid:
                message = f"{shape.modules}: scale {list(shape.scale)} is no grid of"
                fix = f"a weight of {list(shape.weight)} has scales {grid}"
                yield Violation(where, f"{message} {list(self.block_shape)} blocks", fix)
