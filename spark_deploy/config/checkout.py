"""Paths of the checkout and of catalog files.

An installed wheel carries the parts of the checkout that a deploy needs, in the same layout.
"""

from __future__ import annotations

from pathlib import Path

_CARRIED = Path(__file__).resolve().parent.parent / "_checkout"
CHECKOUT = _CARRIED if _CARRIED.is_dir() else _CARRIED.parent.parent


def page(name: str) -> str:
    """Return the reference page of a subject; a wheel has no pages."""
    return f"docs/reference/{name}.md of dgx-spark-deploy"


def catalog_names(
    kind: str, *, checkout: Path = CHECKOUT, own: Path | None = None
) -> tuple[str, ...]:
    """Return the names of ``catalog/<kind>``, sorted; ``kind`` is models or profiles."""
    return tuple(catalog_files(kind, checkout=checkout, own=own))


def catalog_files(
    kind: str, *, checkout: Path = CHECKOUT, own: Path | None = None
) -> dict[str, Path]:
    """Return the file of each name; files in ``own``, the user's folder, win."""
    folders = [checkout] if own is None or own.resolve() == checkout.resolve() else [checkout, own]
    files = {
        path.stem: path
        for folder in folders
        for path in sorted((folder / "catalog" / kind).glob("*.yml"))
    }
    return dict(sorted(files.items()))
