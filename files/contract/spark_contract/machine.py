"""Free memory, driver and boot state of a machine.

The GPU driver of a GB10 needs blocks of 64 KiB and more. Limits: docs/decisions/0005.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

BOOT_ID = "/proc/sys/kernel/random/boot_id"
REBOOT_MARKER = "/run/reboot-required"
REBOOT_PACKAGES = f"{REBOOT_MARKER}.pkgs"
DRIVER_MODULE = "/proc/driver/nvidia/version"
DRIVER_LIBRARIES = "/usr/lib/*-linux-gnu/libnvidia-ml.so.*.*"
# Matches the library, but not the link `libcuda.so.1`.
LIBCUDA = r"libcuda\.so\.[0-9]+\.[0-9][0-9.]*(\+[a-z]+)?"
# Prefix of kernels that preflight advises against, so an installed one is no reason to reboot.
KEXEC_HANDOVER_KERNEL = "7.0.0-1019-"
_MODULE = re.compile(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?(?:\+\w+)?)\s")


@dataclass(frozen=True, slots=True)
class BootSigns:
    kernel: str  # running
    kernels: tuple[str, ...]  # in /boot
    has_reboot_marker: bool  # REBOOT_MARKER exists
    packages: tuple[str, ...]  # in REBOOT_PACKAGES
    module: str = ""  # version of the loaded driver; "" if none
    libraries: tuple[str, ...] = ()  # versions of the driver's library on disk
    has_version_mismatch: bool = False  # reported by the library

    @property
    def reboot_reason(self) -> str:
        """Return why the machine needs a reboot, or ""."""
        has_both = self.module and self.libraries
        if self.has_version_mismatch or (has_both and self.module not in self.libraries):
            library = ", ".join(self.libraries) or "of another version"
            module = self.module or "unknown"
            return f"driver module {module} is loaded, but library {library} is installed"
        if self.has_reboot_marker:
            packages = ", ".join(sorted(set(self.packages))) or "unknown packages"
            return f"{REBOOT_MARKER} exists ({packages})"
        newest = newest_of_same_flavor(self.kernel, self.kernels)
        if newest and version_key(newest) > version_key(self.kernel):
            return f"kernel {newest} is installed, but {self.kernel} is running"
        return ""


def newest_of_same_flavor(kernel: str, kernels: Iterable[str]) -> str:
    """Return the newest usable kernel with the flavor of ``kernel``, such as ``-nvidia``, or ""."""
    flavor = f"-{kernel.rpartition('-')[2]}" if "-" in kernel else ""
    matching = (name for name in kernels if name.endswith(flavor))
    usable = (name for name in matching if not name.startswith(KEXEC_HANDOVER_KERNEL))
    return max(usable, key=version_key, default="")


def version_key(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def module_version(text: str) -> str:
    match = _MODULE.search(text)
    return match[1] if match else ""


def libcuda_version(text: str) -> str:
    """Return the version of the first driver library in ``text``, or an empty string."""
    match = re.search(LIBCUDA, text)
    return match[0].removeprefix("libcuda.so.") if match else ""


def library_versions(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({path.rpartition(".so.")[2] for path in paths}))


GIB = 1 << 30
DRIVER_BLOCK_BYTES = 64 << 10
LOW_BYTES = 8 * GIB  # model loads failed with fewer bytes in free driver blocks
LARGE_BLOCK_BYTES = 32 << 20  # largest block size of a DGX OS kernel
FEW_LARGE_BYTES = 200 * LARGE_BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    by_size: tuple[tuple[int, int], ...]  # (block size, bytes in free blocks of this size)

    def free_bytes(self, min_block_bytes: int = 0) -> int:
        """Sum the free blocks of at least this size; always count those of the largest size."""
        largest_size, _ = self.by_size[-1]
        min_size = min(min_block_bytes, largest_size)
        return sum(free for size, free in self.by_size if size >= min_size)

    def is_low(self, needed_bytes: int) -> bool:
        return self.free_bytes(DRIVER_BLOCK_BYTES) < min(LOW_BYTES, needed_bytes)

    @property
    def is_fragmented(self) -> bool:
        """Return whether much memory is free, but mostly in small blocks."""
        return self.free_bytes() >= 2 * LOW_BYTES and (
            self.free_bytes(DRIVER_BLOCK_BYTES) < LOW_BYTES
            or self.free_bytes(LARGE_BLOCK_BYTES) < FEW_LARGE_BYTES
        )

    @property
    def is_recovered(self) -> bool:
        return (
            self.free_bytes(DRIVER_BLOCK_BYTES) >= 2 * LOW_BYTES
            and self.free_bytes(LARGE_BLOCK_BYTES) >= 2 * FEW_LARGE_BYTES
        )

    def __str__(self) -> str:
        return (
            f"{self.free_bytes() / GIB:.1f} GiB is free, "
            f"{self.free_bytes(DRIVER_BLOCK_BYTES) / GIB:.1f} GiB in blocks of at least 64 KiB, "
            f"{self.free_bytes(LARGE_BLOCK_BYTES) / GIB:.1f} GiB in the largest blocks"
        )


def parse_buddyinfo(text: str, page_bytes: int) -> FreeBlocks | None:
    """Sum the free blocks of all zones by block size; return None if the text lists no zones."""
    rows = re.findall(r"^Node +\d+, zone +\w+((?: +\d+)+)", text, re.M)
    columns = zip(*(row.split() for row in rows), strict=False)
    by_size = []
    for order, counts in enumerate(columns):
        block_bytes = page_bytes << order
        by_size.append((block_bytes, block_bytes * sum(map(int, counts))))
    return FreeBlocks(tuple(by_size)) if by_size else None
