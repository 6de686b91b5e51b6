"""Copies of guests' disks, so that every try of a sweep begins with the same bytes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from lab import guest as guests
from lab.guest import Guest as LabGuest
from lab.paths import LabPaths
from lab.shell import run
from tests.labkit import CHECKOUT, STATE, lab

COPIES = STATE / "run" / "copies"


def _guest(name: str) -> LabGuest:
    return LabGuest(LabPaths(STATE), name)


def _kept(name: str, label: str) -> Path:
    code = run(["git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD"]).strip()
    return COPIES / f"{name}-{label}-{code}.img"


def has(name: str, label: str) -> bool:
    """Tell whether a copy was made with this code."""
    return _kept(name, label).exists()


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    words = ["cp", "--sparse=always", "--reflink=auto", str(source), str(part)]
    subprocess.run(words, check=True, timeout=300)
    part.rename(target)


def keep(name: str, label: str) -> None:
    """Shut a guest down in good order, copy its disk, and have it run again."""
    lab("down", name)
    _copy(_guest(name).disk_image, _kept(name, label))
    lab("up", name, "--engine", "stub")


def give_up(name: str) -> None:
    """End a guest whose disk nobody wants any more, whoever still holds the device below it."""
    one = _guest(name)
    if one.exists():
        guests.power_cut(one)
        one.disk_image.unlink(missing_ok=True)
        guests.clean(one)


def put_back(name: str, label: str) -> None:
    """Have a guest run from a copy; what it held is gone."""
    one = _guest(name)
    give_up(name)
    _copy(_kept(name, label), one.disk_image)
    lab("up", name, "--engine", "stub")


def forget(name: str) -> None:
    """Delete the copies of a guest's disk."""
    for path in COPIES.glob(f"{name}-*.img"):
        path.unlink()
