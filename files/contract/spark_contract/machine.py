"""Free memory, driver and boot state of a machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

BOOT_ID = "/proc/sys/kernel/random/boot_id"
REBOOT_MARKER = "/run/reboot-required"
REBOOT_PACKAGES = f"{REBOOT_MARKER}.pkgs"
DRIVER_MODULE = "/proc/driver/nvidia/version"
DRIVER_LIBRARIES = "/usr/lib/*-linux-gnu/libnvidia-ml.so.*.*"
# With a point in the version: a specification of CDI also names the link `libcuda.so.1`.
LIBCUDA = r"libcuda\.so\.[0-9]+\.[0-9][0-9.]*(\+[a-z]+)?"
_MODULE = re.compile(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?(?:\+\w+)?)\s")


@dataclass(frozen=True, slots=True)
class BootSigns:
    """What a host shows of the boot that it runs, and of what was installed since."""

    kernel: str  # the running one
    kernels: tuple[str, ...]  # those in /boot
    marked: bool  # REBOOT_MARKER is there
    packages: tuple[str, ...]  # that REBOOT_PACKAGES names
    module: str = ""  # version of the driver in memory; "" when none
    libraries: tuple[str, ...] = ()  # versions of the driver's library on disk
    mismatch: bool = False  # the library itself says that the module is not its own

    @property
    def pending(self) -> str:
        """Why a reboot is pending, or an empty string.

        A driver whose library was upgraded under the running module is the pressing kind: the GPU
        is gone for every program that starts now.
        """
        foreign = self.module and self.libraries and self.module not in self.libraries
        if self.mismatch or foreign:
            found = ", ".join(self.libraries) or "of another version"
            return (
                f"driver module {self.module or 'unknown'} is loaded, library {found} is installed"
            )
        if self.marked:
            packages = ", ".join(sorted(set(self.packages))) or "no package named"
            return f"{REBOOT_MARKER} is set ({packages})"
        newest = newest_like(self.kernel, self.kernels)
        if newest and version_key(newest) > version_key(self.kernel):
            return f"kernel {newest} is installed, {self.kernel} is running"
        return ""


def newest_like(kernel: str, kernels: Iterable[str]) -> str:
    """Return the newest kernel with the ending of ``kernel`` (``-nvidia``), else an empty string.

    A ``-generic`` kernel beside a running ``-nvidia`` one is not a pending update.
    """
    ending = f"-{kernel.rpartition('-')[2]}" if "-" in kernel else ""
    return max((one for one in kernels if one.endswith(ending)), key=version_key, default="")


def version_key(version: str) -> tuple[int, ...]:
    """Order versions by their numbers: 6.17.0-1021-nvidia after 6.17.0-1004-nvidia."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def module_version(text: str) -> str:
    """Find the version in what ``DRIVER_MODULE`` says (open and proprietary wording)."""
    found = _MODULE.search(text)
    return found[1] if found else ""


def libcuda_version(text: str) -> str:
    """Return the version of the first driver library that a text names; "" when it names none."""
    found = re.search(LIBCUDA, text)
    return found[0].removeprefix("libcuda.so.") if found else ""


def library_versions(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the versions in the names of ``DRIVER_LIBRARIES``."""
    return tuple(sorted({path.rpartition(".so.")[2] for path in paths}))


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
