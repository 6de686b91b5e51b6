"""Bytes on each filesystem a host writes to: the highest on the way, and what stays."""

from __future__ import annotations

from collections.abc import Sequence

from spark_deploy.plan.types import CheckpointPlan, DiskUse, ImagePlan, SourcePlan

_GIB = 1024**3
# Layers unpack to a bit more than twice their compressed size, and both lie there for a while.
_UNPACKED = 2.2
_CACHE_BYTES = 2 * _GIB


def disk_plan(
    cache_dir: str,
    docker_dir: str,
    sources: Sequence[SourcePlan],
    checkpoint: CheckpointPlan | None,
    image: ImagePlan,
) -> tuple[DiskUse, ...]:
    """Return the use of every folder; image and cache are estimates, the rest is exact.

    Each path is the folder of one artefact, so that what lies there already can be subtracted.
    """
    kept = checkpoint is None or checkpoint.keep_base
    uses = [
        DiskUse(source.dir, source.repo, source.size_bytes, source.size_bytes if kept else 0)
        for source in sources
    ]
    if checkpoint:
        size = checkpoint.output_bytes
        uses.append(DiskUse(checkpoint.dir, f"checkpoint {checkpoint.name}", size, size))
    unpacked = round(image.size_bytes * _UNPACKED)
    uses.append(DiskUse(docker_dir, "engine image", image.size_bytes + unpacked, unpacked))
    uses.append(DiskUse(cache_dir, "compile cache", _CACHE_BYTES, _CACHE_BYTES))
    return tuple(uses)


def done_once_there(checkpoint: CheckpointPlan | None) -> tuple[tuple[str, str], ...]:
    """Return (path, tree) pairs: with the tree in place, the path takes no more bytes.

    A tree appears by one rename, so it is whole when it is there, also when it is smaller than
    planned (names that the base holds twice come out once); a base not kept is not fetched again.
    """
    if checkpoint is None or checkpoint.builder["layout"] != "full":
        return ()
    beside = () if checkpoint.keep_base else ((checkpoint.base.dir, checkpoint.dir),)
    return ((checkpoint.dir, checkpoint.dir), *beside)


def needed_by_path(uses: Sequence[DiskUse]) -> tuple[tuple[str, int], ...]:
    """Return the peak of every folder, for preflight."""
    total: dict[str, int] = {}
    for use in uses:
        total[use.path] = total.get(use.path, 0) + use.peak_bytes
    return tuple(sorted(total.items()))
