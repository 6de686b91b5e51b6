"""Mounts of the lab: guests' disks, and unmounting everything, deepest first."""

import time
from pathlib import Path

from lab.errors import LabError
from lab.shell import run, succeeds


def mount_points(below: Path) -> list[Path]:
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = Path(line.split()[4].replace("\\040", " "))
        if point.is_relative_to(below):
            points.append(point)
    return sorted(points, key=lambda path: len(path.parts), reverse=True)


def mount_disk(image: Path, target: Path) -> None:
    run(["mount", "-o", "loop,discard", image, target])


def unmount_below(directory: Path) -> None:
    for _ in range(50):
        points = mount_points(directory)
        if not points:
            return
        for point in points:
            if not succeeds(["umount", point]):
                succeeds(["umount", "-l", point])
    raise LabError(str(directory), f"still mounted: {points}", "unmount it; see `findmnt`")


def wait_for_loop(image: Path, timeout_s: float = 120) -> None:
    """Wait until no loop device serves ``image``; a second device would damage the disk."""
    deadline = time.monotonic() + timeout_s
    while image.exists() and run(["losetup", "-j", image]).strip():
        if time.monotonic() > deadline:
            raise LabError(
                str(image), "the loop device stays busy",
                "find the mount namespace that uses it with `losetup -a` and `lsns -t mnt`",
            )  # fmt: skip
        time.sleep(0.1)
