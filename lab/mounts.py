"""Mounts of the lab: guests' disks, and taking everything down again, deepest first."""

from __future__ import annotations

import time
from pathlib import Path

from lab.errors import LabError
from lab.shell import run, succeeds


def mount_points(below: Path) -> list[Path]:
    """Return the mount points at or below ``below`` in this namespace, deepest first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # Blanks in a path come as \040 (proc(5)).
        point = Path(line.split()[4].replace("\\040", " "))
        if point.is_relative_to(below):
            found.append(point)
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def mount_disk(image: Path, target: Path) -> None:
    """Mount the disk image; what the guest deletes is given back to the machine."""
    run(["mount", "-o", "loop,discard", image, target])


def unmount_below(directory: Path) -> None:
    """Unmount everything at or below ``directory``, stacked mounts too."""
    for _ in range(50):
        points = mount_points(directory)
        if not points:
            return
        for point in points:
            if not succeeds(["umount", point]):
                succeeds(["umount", "-l", point])
    raise LabError(str(directory), f"still mounted: {points}", "see `findmnt`, then umount by hand")


def wait_for_loop(image: Path, timeout_s: float = 120) -> None:
    """Wait until no loop device serves ``image``: a second one over it would damage the disk."""
    deadline = time.monotonic() + timeout_s
    while image.exists() and run(["losetup", "-j", image]).strip():
        if time.monotonic() > deadline:
            raise LabError(
                str(image), "its loop device stays busy",
                "some mount namespace still holds it; see `losetup -a` and `lsns -t mnt`",
            )  # fmt: skip
        time.sleep(0.1)
