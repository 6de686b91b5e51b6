"""Bytes of what an engine loads beside a model: a drafter of its own repository, adapters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from spark_deploy.config.catalog.model import Model
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.plan.types import CheckpointPlan, DiskUse, ImagePlan, PairPlan

# Which of them share a filesystem, and what is free or there already, only the host knows:
# preflight and ``doctor`` compare (``spark_deploy/hosts/capacity.py``).


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


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The KV cache of one model and profile."""

    block_tokens: int
    block_bytes: int  # of one block over the layers of one group
    attention_groups: int
    state_blocks: int  # blocks that one request needs for its states
    window_groups: int = 0  # of layers that keep a window of the context only
    window_tokens: int = 0

    def request_blocks(self, tokens: int) -> int:
        """Blocks of one request of this length."""
        pages = self.attention_groups * math.ceil(tokens / self.block_tokens)
        if self.window_groups:
            # One more: a window begins anywhere in a block.
            kept = math.ceil(min(tokens, self.window_tokens) / self.block_tokens) + 1
            pages += self.window_groups * kept
        return pages + self.state_blocks

    def held_tokens(self, cache_bytes: int, sequences: int, longest: int) -> int:
        """Tokens of context that fit beside the states of so many requests."""
        blocks = cache_bytes // self.block_bytes
        if self.window_groups:
            return int(blocks / self.request_blocks(longest) * longest)
        left = max(blocks - self.state_blocks * sequences, 0)
        return left // max(1, self.attention_groups) * self.block_tokens


def group_layers(kinds: Iterable[int]) -> int:
    """Return how many layers one group has: every group of the cache has as many."""
    counts = sorted(count for count in kinds if count) or [1]
    return counts[-1] if counts[-1] < 1.25 * counts[0] else counts[0]


# Slots for adapters are as wide as the widest may be; the engine knows these widths only.
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def drafter_bytes(profile: Profile) -> int:
    """Return the bytes of a drafter that has a repository; its own embedding may be shared."""
    anatomy = profile.speculation.anatomy if profile.speculation else None
    return anatomy.weights_bytes if anatomy else 0


def adapter_rank(model: Model) -> int:
    """Return how wide the slots for adapters are; 0 without adapters."""
    widest = max((one.rank for one in model.adapters.values()), default=0)
    return next((rank for rank in ADAPTER_RANKS if rank >= widest), widest) if widest else 0


def adapters_bytes(model: Model) -> int:
    """Return the bytes of as many slots as there are adapters, each as large as the largest."""
    rank = adapter_rank(model)
    sizes = [
        one.anatomy.weights_bytes * rank // one.rank
        for one in model.adapters.values()
        if one.anatomy
    ]
    return len(model.adapters) * max(sizes, default=0)
