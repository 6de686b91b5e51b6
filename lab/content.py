"""Content keys: cached pieces are named by a hash of their inputs."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from lab.paths import LabPaths

_PACKAGE = Path(__file__).parent


def content_key(*parts: object, trees: Iterable[Path] = ()) -> str:
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
    if target.exists():
        return target
    temporary = target.with_name(f"{target.name}.part")
    if temporary.is_dir():
        shutil.rmtree(temporary)
    temporary.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"building {target.name} (cached)", file=sys.stderr, flush=True)
    make(temporary)
    temporary.rename(target)
    return target


def use_copied_code(paths: LabPaths) -> None:
    """Run supervisors and servers from a copy of this code, because the checkout may change."""
    sources = sorted([*_PACKAGE.glob("*.py"), *_PACKAGE.glob("hub/*.py")])
    names = [path.relative_to(_PACKAGE).as_posix() for path in sources]
    key = content_key(names, trees=sources)

    def make(target: Path) -> None:
        for path, name in zip(sources, names, strict=True):
            (target / "lab" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / "lab" / name)

    copy = cached(paths.state / "code" / key, make)
    os.environ["PYTHONPATH"] = str(copy)
    os.environ["SPARK_LAB_DIR"] = str(paths.state)
