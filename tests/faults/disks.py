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


def _copy_path(name: str, label: str) -> Path:
    commit = run(["git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD"]).strip()
    return COPIES / f"{name}-{label}-{commit}.img"


def has(name: str, label: str) -> bool:
    return _copy_path(name, label).exists()


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    arguments = ["cp", "--sparse=always", "--reflink=auto", str(source), str(part)]
    subprocess.run(arguments, check=True, timeout=300)
    part.rename(target)


def save(name: str, label: str) -> None:
    lab("down", name)
    _copy(_guest(name).disk_image, _copy_path(name, label))
    lab("up", name, "--engine", "stub")


def discard(name: str) -> None:
    guest = _guest(name)
    if guest.exists():
        guests.power_cut(guest)
        guest.disk_image.unlink(missing_ok=True)
        guests.clean(guest)


def restore(name: str, label: str) -> None:
    discard(name)
    _copy(_copy_path(name, label), _guest(name).disk_image)
    lab("up", name, "--engine", "stub")


def delete_copies(name: str) -> None:
    for path in COPIES.glob(f"{name}-*.img"):
        path.unlink()
