"""Paths of the checkout, of catalog files and of the cache.

An installed wheel contains the parts of the checkout that a deploy needs, in the same layout.
"""

import os
import tempfile
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_IN_WHEEL = _PACKAGE / "_checkout"
CHECKOUT = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent


def cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spark-deploy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK)
    except OSError:
        is_writable = False
    return folder if is_writable else Path(tempfile.mkdtemp(prefix="spark-deploy-"))


def catalog_files(
    kind: str, *, checkout: Path = CHECKOUT, user_dir: Path | None = None
) -> dict[str, Path]:
    """Return the files by name, sorted; files in ``user_dir`` replace shipped files."""
    folders = [checkout]
    if user_dir is not None and user_dir.resolve() != checkout.resolve():
        folders.append(user_dir)
    files = {
        path.stem: path
        for folder in folders
        for path in sorted((folder / "catalog" / kind).glob("*.yml"))
    }
    return dict(sorted(files.items()))
