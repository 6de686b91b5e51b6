"""Where this checkout lies, and which names its catalog holds."""

from __future__ import annotations

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def catalog_names(kind: str, *, checkout: Path = CHECKOUT) -> tuple[str, ...]:
    """Return the file stems of ``catalog/<kind>``, sorted; ``kind`` is models or profiles."""
    return tuple(sorted(path.stem for path in (checkout / "catalog" / kind).glob("*.yml")))
