"""What a machine shows of its driver and its boot, and whether it waits for the next one."""

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
