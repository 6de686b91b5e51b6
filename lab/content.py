"""Content keys: a cached piece is named by the hash of everything it was made from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path


def content_key(*parts: object, trees: Iterable[Path] = ()) -> str:
    """Return 12 hex digits over JSON-able ``parts`` and the files (mode, bytes) of ``trees``."""
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    for tree in trees:
        for path in sorted(tree.rglob("*")) if tree.is_dir() else [tree]:
            if "__pycache__" in path.parts:
                continue
            name = path.relative_to(tree).as_posix()
            digest.update(f"\0{name}\0".encode())
            if path.is_symlink():
                digest.update(os.readlink(path).encode())
            elif path.is_file():
                digest.update(b"x" if os.access(path, os.X_OK) else b"-")
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def cached(target: Path, make: Callable[[Path], None]) -> Path:
    """Return ``target``, made by ``make(temporary)`` and one rename if it is not there yet."""
    if target.exists():
        return target
    temporary = target.with_name(f"{target.name}.part")
    if temporary.is_dir():
        shutil.rmtree(temporary)
    temporary.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"making {target.name} (kept for the next time)", file=sys.stderr, flush=True)
    make(temporary)
    temporary.rename(target)
    return target
