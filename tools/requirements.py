"""Read pinned requirements: name, version, hashes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==([^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Pin:
    """One package at one version, with the hashes of its files."""

    name: str
    version: str
    sha256: tuple[str, ...]


def pins(path: Path) -> Iterator[Pin]:
    """Yield every pin of a file that ``uv pip compile --generate-hashes`` wrote.

    Raises:
        ValueError: a line is neither a pin nor a comment.
    """
    for line in path.read_text("utf-8").replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        found = _PIN.match(line)
        if found is None:
            raise ValueError(f"{path}: {line[:80]!r} is no pinned package")
        name = re.sub(r"[-_.]+", "-", found[1]).lower()
        yield Pin(name, found[2], tuple(sorted(_HASH.findall(line))))
