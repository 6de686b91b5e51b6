"""Plots as SVG that stands in a page: bars in groups, and lines."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

_COLOURS = ("#3e63dd", "#e5484d", "#30a46c", "#f76b15", "#8e4ec6")
_WIDTH, _HEIGHT = 760, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 34, 30

Point = tuple[float, float]


def colour(at: int) -> str:
    """Return the colour of the result at this place."""
    return _COLOURS[at % len(_COLOURS)]


def bars(groups: Sequence[tuple[str, Sequence[float | None]]], title: str) -> str:
    """Return a bar for each value, side by side in named groups."""
    highest = _round_up(max((v for _, values in groups for v in values if v), default=1.0))
    return _plot(title, highest, _bars(groups, highest))


def lines(series: Sequence[Sequence[Point]], title: str) -> str:
    """Return a line for each series, over a common scale from zero."""
    points = [point for one in series for point in one]
    highest = _round_up(max((y for _, y in points), default=1.0))
    furthest = max((x for x, _ in points), default=1.0) or 1.0
    return _plot(title, highest, _lines(series, highest, furthest))


def _plot(title: str, highest: float, drawn: Iterator[str]) -> str:
    said = html.escape(title)
    inner = "".join((*_scale(highest), *drawn))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{said}">'
        f'<text x="{_LEFT}" y="16">{said}</text>{inner}</svg>'
    )


def _scale(highest: float) -> Iterator[str]:
    for step in range(5):
        value = highest * step / 4
        y = _y(value, highest)
        yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{_short(value)}</text>'


def _bars(groups: Sequence[tuple[str, Sequence[float | None]]], highest: float) -> Iterator[str]:
    room = (_WIDTH - _LEFT - _RIGHT) / max(1, len(groups))
    for at, (name, values) in enumerate(groups):
        width = min(48.0, room * 0.7 / max(1, len(values)))
        start = _LEFT + room * (at + 0.5) - width * len(values) / 2
        for place, value in enumerate(values):
            if value is None:
                continue
            x, y = start + place * width, _y(value, highest)
            height = _HEIGHT - _BOTTOM - y
            yield (
                f'<rect x="{x + 2:.1f}" y="{y}" width="{width - 4:.1f}" height="{height:.1f}" '
                f'rx="3" fill="{colour(place)}"/>'
            )
            middle = x + width / 2
            yield (
                f'<text class="value" x="{middle:.1f}" y="{y - 5:.1f}" '
                f'text-anchor="middle">{_short(value)}</text>'
            )
        centre = _LEFT + room * (at + 0.5)
        yield f'<text x="{centre:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">' \
            f"{html.escape(name)}</text>"  # fmt: skip


def _lines(series: Sequence[Sequence[Point]], highest: float, furthest: float) -> Iterator[str]:
    def x_of(value: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * value / furthest, 1)

    for step in range(5):
        value = furthest * step / 4
        anchor = "end" if step == 4 else "middle"
        x = x_of(value)
        yield f'<text x="{x}" y="{_HEIGHT - 10}" text-anchor="{anchor}">{_short(value)}</text>'
    for at, one in enumerate(series):
        places = [(x_of(x), _y(y, highest)) for x, y in sorted(one)]
        path = " ".join(f"{x},{y}" for x, y in places)
        yield f'<polyline points="{path}" fill="none" stroke="{colour(at)}" stroke-width="2"/>'
        if len(places) <= 20:
            for x, y in places:
                yield f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour(at)}"/>'


def _y(value: float, highest: float) -> float:
    return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / highest, 1)


def _round_up(value: float) -> float:
    """Return the next number that four even steps divide well."""
    size = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(
        (size * step for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 6, 8, 10) if size * step >= value),
        value,
    )


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
