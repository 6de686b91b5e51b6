"""How much of a plan's files lies on a host already, whoever put it there."""

from __future__ import annotations

from dataclasses import dataclass

from spark_deploy.facts.service.stored import Stored
from spark_deploy.lockfile.resolve import size
from spark_deploy.planning.machine import NeedsPlan


@dataclass(frozen=True, slots=True)
class Reuse:
    """Files of known content that a deploy links or leaves where they are."""

    found_bytes: int
    whole_bytes: int
    folders: tuple[str, ...]  # where they lie, the fullest first


def reused(stored: Stored, needs: NeedsPlan) -> Reuse:
    """Compare what a host holds with what its plan would fetch."""
    wanted = {file for _, files in needs.downloads for file in files}
    there = {(sha256, size_bytes) for _, sha256, size_bytes in stored.files}
    bytes_in: dict[str, int] = {}
    for sha256, size_bytes in wanted & there:
        folder = stored.folders.get(sha256, "")
        bytes_in[folder] = bytes_in.get(folder, 0) + size_bytes
    folders = sorted(bytes_in, key=lambda folder: (-bytes_in[folder], folder))
    whole_bytes = sum(size_bytes for _, size_bytes in wanted)
    return Reuse(sum(bytes_in.values()), whole_bytes, tuple(filter(None, folders)))


def told(one: Reuse) -> str:
    """Say it in a line; nothing where nothing lies there."""
    if not one.found_bytes:
        return ""
    where = f" found in {', '.join(one.folders)}" if one.folders else ""
    found, whole = size(one.found_bytes), size(one.whole_bytes)
    if found.split()[1] == whole.split()[1]:
        found = found.split()[0]
    return f"Reusing {found} of {whole}{where}; not fetched again, nothing is moved"
