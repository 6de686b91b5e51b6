"""What is known of the base's bytes before a build: its receipt, or hashes made now."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

from spark_checkpoint.donor import Span
from spark_checkpoint.errors import GateRefused
from spark_checkpoint.plan import BuildPlan
from spark_checkpoint.progress import Progress
from spark_checkpoint.receipt import Receipt, load_receipt
from spark_checkpoint.storage import COPY_BYTES, hash_file
from spark_checkpoint.tree import Tree, files_of

_FIX = "delete the source directory and fetch it again"


def base_hashes(plan: BuildPlan, progress: Progress) -> dict[str, str]:
    """Return path → sha256 of every base file.

    With a pinned revision they come from the source's receipt, after its commit, file set and
    sizes were checked; a file touched since it was fetched is hashed again. Without a revision
    every file is hashed here.
    """
    directory = plan.base_dir
    if plan.base_revision is None:
        return _hash_all(directory, files_of(directory), progress)
    receipt = load_receipt(directory)
    if receipt is None or receipt.document.get("commit") != plan.base_revision:
        found = "has no receipt" if receipt is None else f"is {receipt.document.get('commit')}"
        raise GateRefused(
            str(directory),
            f"{found}, the plan wants the verified tree of commit {plan.base_revision}",
            "fetch the base at the locked commit",
        )
    touched = _touched(directory, receipt)
    again = _hash_all(directory, touched, progress)
    hashes = receipt.hashes()
    for name, found in again.items():
        if found != hashes.get(name):
            raise GateRefused(
                str(directory / name), "was changed after it was fetched and verified", _FIX
            )
    return hashes


def compare_duplicates(base: Tree) -> dict[str, Any]:
    """Return how many names are in several shards, and how many of them differ in bytes."""
    differing = 0
    for name, shards in base.duplicates.items():
        hashes = Counter(
            _span_hash(
                Span(
                    base.directory / shard,
                    base.shards[shard].file_offset(name),
                    base.shards[shard].tensors[name].size_bytes,
                )
            )
            for shard in shards
        )
        differing += len(hashes) > 1
    return {"names": len(base.duplicates), "differing": differing, "rule": "last file wins"}


def _touched(directory: Path, receipt: Receipt) -> list[str]:
    expected = {file.path for file in receipt.files}
    found = set(files_of(directory))
    if found != expected:
        odd = sorted(found ^ expected)[:3]
        raise GateRefused(str(directory), f"files differ from its receipt ({', '.join(odd)})", _FIX)
    touched = []
    for file in receipt.files:
        status = (directory / file.path).stat()
        if status.st_size != file.size_bytes:
            raise GateRefused(
                str(directory / file.path),
                f"has {status.st_size} bytes, its receipt says {file.size_bytes}",
                _FIX,
            )
        if file.modified_ns is None or status.st_mtime_ns != file.modified_ns:
            touched.append(file.path)
    return touched


def _hash_all(directory: Path, names: list[str], progress: Progress) -> dict[str, str]:
    if names:
        progress.phase("hash-base", sum((directory / name).stat().st_size for name in names))
    return {name: hash_file(directory / name, progress.add) for name in names}


def _span_hash(span: Span) -> str:
    hasher, left = hashlib.sha256(), span.size_bytes
    with span.path.open("rb") as file:
        file.seek(span.offset)
        while left:
            piece = file.read(min(left, COPY_BYTES))
            if not piece:
                raise GateRefused(str(span.path), "became shorter while it was read", _FIX)
            hasher.update(piece)
            left -= len(piece)
    return hasher.hexdigest()
