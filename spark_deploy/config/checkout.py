"""Paths of the checkout and of catalog files.

An installed wheel carries the parts of the checkout that a deploy needs, in the same layout.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_CARRIED = Path(__file__).resolve().parent.parent / "_checkout"
CHECKOUT = _CARRIED if _CARRIED.is_dir() else _CARRIED.parent.parent


def page(name: str) -> str:
    """Return the reference page of a subject; a wheel has no pages."""
    return f"docs/reference/{name}.md of dgx-spark-deploy"


def cache_folder() -> Path:
    """Return the folder for logs and downloads of this machine, or a temporary one."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spark-deploy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK)
    except OSError:
        is_writable = False
    return folder if is_writable else Path(tempfile.mkdtemp(prefix="spark-deploy-"))


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
