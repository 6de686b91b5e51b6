"""Free memory by the size of its contiguous blocks, as ``/proc/buddyinfo`` lists it.

The GPU driver of a GB10 allocates system memory in blocks of 64 KiB and more. A host can have much
free memory in smaller pieces only. Limits and their sources: docs/decisions/0005.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1 << 30
DRIVER_BLOCK_BYTES = 64 << 10
LOW_BYTES = 8 * GIB  # free in such blocks; below it, loads failed
LARGE_BLOCK_BYTES = 32 << 20  # the largest of a DGX OS kernel
FEW_LARGE_BYTES = 200 * LARGE_BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Free bytes of the whole host for each block size, smallest first."""

    by_size: tuple[tuple[int, int], ...]  # (bytes of one block, bytes free in such blocks)

    def free_bytes(self, smallest_bytes: int = 0) -> int:
        """Add up blocks of at least this size, or of the largest size that the kernel keeps."""
        smallest_bytes = min(smallest_bytes, self.by_size[-1][0])
        return sum(free for size, free in self.by_size if size >= smallest_bytes)

    def is_low(self, needed_bytes: int) -> bool:
        """Whether the driver may fail to allocate, whatever holds the memory."""
        return self.free_bytes(DRIVER_BLOCK_BYTES) < min(LOW_BYTES, needed_bytes)

    @property
    def is_fragmented(self) -> bool:
        """Whether much memory is free, but little of it in large blocks."""
        return self.free_bytes() >= 2 * LOW_BYTES and (
            self.free_bytes(DRIVER_BLOCK_BYTES) < LOW_BYTES
            or self.free_bytes(LARGE_BLOCK_BYTES) < FEW_LARGE_BYTES
        )

    @property
    def is_recovered(self) -> bool:
        """Whether twice the limits of ``is_fragmented`` are free."""
        return (
            self.free_bytes(DRIVER_BLOCK_BYTES) >= 2 * LOW_BYTES
            and self.free_bytes(LARGE_BLOCK_BYTES) >= 2 * FEW_LARGE_BYTES
        )

    def __str__(self) -> str:
        """Return the figures that the limits apply to."""
        return (
            f"{self.free_bytes() / GIB:.1f} GiB free, "
            f"{self.free_bytes(DRIVER_BLOCK_BYTES) / GIB:.1f} GiB of it in blocks of 64 KiB or "
            f"more, {self.free_bytes(LARGE_BLOCK_BYTES) / GIB:.1f} GiB in the largest blocks"
        )


def parse_buddyinfo(text: str, page_bytes: int) -> FreeBlocks | None:
    """Add up the zones of ``/proc/buddyinfo``; ``None`` if there is none."""
    zones = [line.split() for line in re.findall(r"^Node +\d+, zone +\w+((?: +\d+)+)", text, re.M)]
    sums = [sum(map(int, counts)) for counts in zip(*zones, strict=False)]  # by order
    sizes = [(page_bytes << order, count) for order, count in enumerate(sums)]
    return FreeBlocks(tuple((size, size * count) for size, count in sizes)) if sizes else None
