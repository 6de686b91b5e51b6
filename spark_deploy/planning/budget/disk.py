"""Bytes in each folder that artefacts go to, and in all: the highest on the way, and what stays.

Which of them share a filesystem, and what is free or there already, only the host knows: preflight
and ``doctor`` compare (``spark_deploy/preflight/capacity.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spark_deploy.planning.types import CheckpointPlan, DiskUse, ImagePlan, PairPlan

_GIB = 1024**3
# The engine image of 0.31.0: 11.0 GB compressed, 26.4 GB unpacked; a pull needs both.
_UNPACKED = 2.5
_CACHE_BYTES = 4 * _GIB  # of the release that serves and of the one before it


def disk_plan(docker_dir: str, pairs: Sequence[PairPlan]) -> tuple[DiskUse, ...]:
    """Return the use of every folder; image and cache are estimates, the rest is exact.

    Each path is the folder of one artefact, so that what lies there already can be subtracted.
    What pairs share counts once.

    Args:
        docker_dir: where the container engine keeps images.
        pairs: the one to serve, then those to have ready.
    """
    uses: dict[tuple[str, str], DiskUse] = {}
    for pair in pairs:
        for use in _of_pair(docker_dir, pair):
            uses.setdefault((use.path, use.what), use)
    return tuple(uses.values())


def _of_pair(docker_dir: str, pair: PairPlan) -> Iterator[DiskUse]:
    kept = pair.checkpoint is None or pair.checkpoint.keep_base
    beside = {one.source.dir for one in pair.beside}
    for source in pair.sources:
        size = source.size_bytes
        stays = kept or source.dir in beside
        yield DiskUse(source.dir, source.locked.repo, size, size if stays else 0)
    if pair.requantized:
        made = pair.requantized
        what = f"INT4 tree {made.order.name}"
        yield DiskUse(made.dir, what, made.order.work_bytes, made.size_bytes)
    if pair.checkpoint:
        size = pair.checkpoint.output_bytes
        yield DiskUse(pair.checkpoint.dir, f"checkpoint {pair.checkpoint.order.name}", size, size)
    after = image_after_bytes(pair.image)
    yield DiskUse(docker_dir, f"image {pair.image.tag}", image_peak_bytes(pair.image), after)
    yield DiskUse(pair.cache_dir, "compile cache", _CACHE_BYTES, _CACHE_BYTES)


def image_after_bytes(image: ImagePlan) -> int:
    """Return what an image takes once it is unpacked."""
    return round(image.size_bytes * _UNPACKED)


def image_peak_bytes(image: ImagePlan) -> int:
    """Return what an image takes while it arrives."""
    return image.size_bytes + image_after_bytes(image)


def disk_total(uses: Sequence[DiskUse]) -> tuple[int, int]:
    """Return what a bare host with one filesystem needs at most on the way, and what it keeps."""
    return sum(use.peak_bytes for use in uses), sum(use.after_bytes for use in uses)


def done_once_there(checkpoint: CheckpointPlan | None) -> tuple[tuple[str, str], ...]:
    """Return (path, tree) pairs: with the tree in place, the path takes no more bytes.

    A tree appears by one rename, so it is whole when it is there, also when it is smaller than
    planned (names that the base holds twice come out once); a base not kept is not fetched again.
    """
    if checkpoint is None or checkpoint.order.layout != "full":
        return ()
    beside = () if checkpoint.keep_base else ((checkpoint.base.dir, checkpoint.dir),)
    return ((checkpoint.dir, checkpoint.dir), *beside)


def needed_by_path(uses: Sequence[DiskUse]) -> tuple[tuple[str, int], ...]:
    """Return the peak of every folder, for preflight."""
    total: dict[str, int] = {}
    for use in uses:
        total[use.path] = total.get(use.path, 0) + use.peak_bytes
    return tuple(sorted(total.items()))
