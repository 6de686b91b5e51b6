"""Where the checkout lies, and which names its catalog holds.

An installed wheel carries the parts of the checkout that a deploy needs, laid out as in one.
"""

from __future__ import annotations

from pathlib import Path

_CARRIED = Path(__file__).resolve().parent / "_checkout"
CHECKOUT = _CARRIED if _CARRIED.is_dir() else _CARRIED.parent.parent


def catalog_names(kind: str, *, checkout: Path = CHECKOUT) -> tuple[str, ...]:
    """Return the file stems of ``catalog/<kind>``, sorted; ``kind`` is models or profiles."""
    return tuple(sorted(path.stem for path in (checkout / "catalog" / kind).glob("*.yml")))
