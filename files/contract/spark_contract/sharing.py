"""What hosts lend each other while a deploy needs it: files of trees, whole or being fetched.

What a peer sends is proven like what a hub sends: by the hashes in the order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from spark_contract.documents import OPTIONAL
from spark_contract.paths import CONFIG_DIR

SHARE_SETTINGS = f"{CONFIG_DIR}/share.json"
SHARE_KEY = f"{CONFIG_DIR}/share-key"  # 0600; there while the host lends


@dataclass(frozen=True, slots=True)
class SharedTree:
    """A tree whose files peers may read."""

    digest: str  # of the tree: what a receipt carries
    dir: str
    job: str  # twelve digits of the job that makes it: peers look whether it gets on
    # Files of a tree being fetched have their names once they are proven, those of a build do not.
    unfinished: bool


@dataclass(frozen=True, slots=True)
class Share:
    """Where a host lends, and what."""

    SCHEMA_VERSION: ClassVar[int] = 1

    address: str
    port: int
    trees: tuple[SharedTree, ...]


@dataclass(frozen=True, slots=True)
class Peers:
    """Where else the files of one tree may be."""

    urls: tuple[str, ...]  # of hosts, without what of_tree adds; in the order to ask in
    key_file: str = field(default=SHARE_KEY, metadata=OPTIONAL)
    # So long one may stand still before it is left for the hub, or before it begins.
    patience_s: float = field(default=30.0, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class FinishedTree:
    """A tree that a peer has whole; its receipt was read over another way than the tree will be."""

    url: str  # of the host
    receipt_sha256: str


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """``copy.json``: where a tree that could be built is there already."""

    SCHEMA_VERSION: ClassVar[int] = 1

    digest: str  # of the tree
    trees: tuple[FinishedTree, ...]  # in the order to ask in
    key_file: str = field(default=SHARE_KEY, metadata=OPTIONAL)


def of_tree(url: str, digest: str) -> str:
    """Return the address of a tree at a peer: below it ``files/PATH`` and ``progress``."""
    return f"{url.rstrip('/')}/{digest}"


def growing_dir(out: Path) -> Path:
    """Return where the work on a tree lies before it is whole; the same on every try."""
    return out.parent / f".{out.name}.partial"


def growing_tree(out: Path) -> Path:
    """Return where a tree grows before it is renamed to ``out``."""
    return growing_dir(out) / "tree"
