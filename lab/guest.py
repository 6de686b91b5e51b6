"""A guest: disk, identity, life from create to destroy."""

import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lab import cgroup, mounts, network
from lab.errors import LabError
from lab.paths import LabPaths, guest_index, guest_ip
from lab.shell import run
from lab.variant import read as read_variant

DISK_GIB = 24  # sparse
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN, _IOR('X', 125, u32)
_WITHOUT_FLUSH = 2
# Folders of /var/lib where container engines mount overlays, so they must not be on an overlay.
ENGINE_DIRS = ("docker", "containerd")


@dataclass(frozen=True, slots=True)
class GuestSpec:
    name: str
    base: str
    bootstrap: bool  # starts like a new Spark: password login, no key
    password: str | None


class Guest:
    def __init__(self, paths: LabPaths, name: str):
        self.paths, self.name = paths, name
        self.home = paths.guests / name
        self.disk_image, self.disk = self.home / "disk.img", self.home / "disk"
        self.root = self.home / "root"
        self.console = self.home / "console.log"

    @property
    def index(self) -> int:
        return guest_index(self.name)

    @property
    def ip(self) -> str:
        return guest_ip(self.index)

    @property
    def more_disks(self) -> list[tuple[Path, Path]]:
        return [(image, image.with_suffix("")) for image in sorted(self.home.glob("disks/*.img"))]

    @property
    def variant(self) -> str:
        path = self.home / "variant"
        return path.read_text() if path.exists() else ""

    def spec(self) -> GuestSpec:
        try:
            return GuestSpec(**json.loads((self.home / "guest.json").read_text()))
        except FileNotFoundError as error:
            raise LabError(self.name, "no such guest", f"run `lab up {self.name}`") from error

    def exists(self) -> bool:
        return (self.home / "guest.json").exists()


def create(guest: Guest, spec: GuestSpec, *, variant: str = "", disks: Sequence[str] = ()) -> None:
    """Create the guest's disk; guest.json is written last."""
    _forget(guest)
    for directory in (guest.disk, guest.root, guest.home / "cg", guest.home / "cg2"):
        directory.mkdir(parents=True)
    _make_disk(guest.disk_image)
    for name in disks:
        (guest.home / "disks" / name).mkdir(parents=True)
        _make_disk(guest.home / f"disks/{name}.img")
    mounts.mount_disk(guest.disk_image, guest.disk)
    for name in ("upper", "work"):
        (guest.disk / name).mkdir()
    # Not in guest.json, which other versions of this code read too.
    (guest.home / "variant").write_text(variant)
    (guest.home / "guest.json").write_text(json.dumps(asdict(spec)))


def _make_disk(image: Path) -> None:
    with image.open("wb") as file:
        file.truncate(DISK_GIB << 30)
    run(["mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=1", image])


def mount_root(guest: Guest) -> None:
    if not os.path.ismount(guest.disk):
        mounts.mount_disk(guest.disk_image, guest.disk)
    for image, point in guest.more_disks:
        if not os.path.ismount(point):
            mounts.mount_disk(image, point)
    for name in ENGINE_DIRS:
        (guest.disk / name).mkdir(exist_ok=True)
    if os.path.ismount(guest.root):
        return
    layers = f"lowerdir={guest.spec().base},upperdir={guest.disk}/upper,workdir={guest.disk}/work"
    run(["mount", "-t", "overlay", f"lab-{guest.name}", "-o", layers, guest.root])


def start(guest: Guest) -> None:
    proxied = bool(guest.variant) and read_variant(guest.variant).proxied
    network.connect(guest.name, proxied=proxied)
    cgroup.create(guest.name)
    with (guest.home / "supervisor.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "lab", "_supervise", guest.name],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
        )  # fmt: skip


@contextmanager
def supervising(guest: Guest) -> Iterator[None]:
    with (guest.home / "supervisor.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (guest.home / "supervisor.pid").write_text(str(os.getpid()))
        yield


def supervisor_pid(guest: Guest) -> int | None:
    path = guest.home / "supervisor.lock"
    if not path.exists():
        return None
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int((guest.home / "supervisor.pid").read_text())
    return None


def leader_pid(guest: Guest) -> int | None:
    for pid in sorted(cgroup.pids(guest.name)):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        nspid = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid"))
        if len(nspid) == 2 and nspid[1] == "1":
            return pid
    return None


def state(guest: Guest) -> str:
    if supervisor_pid(guest) is not None and leader_pid(guest) is not None:
        return "running"
    if cgroup.pids(guest.name):
        return "orphan" if supervisor_pid(guest) is None else "starting"
    return "stopped" if guest.exists() else "absent"


def power_off(guest: Guest, *, timeout_s: float = 40) -> None:
    pid = supervisor_pid(guest)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while supervisor_pid(guest) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
    clean(guest)


def power_cut(guest: Guest) -> None:
    cgroup.kill(guest.name)


def lose_unsynced(guest: Guest) -> None:
    """Shut ext4 down without flushing its journal, so that unsynced data is lost; then kill."""
    for point in (guest.disk, *(point for _, point in guest.more_disks)):
        if not os.path.ismount(point):
            raise LabError(guest.name, "disk is not mounted", f"run `lab up {guest.name}`")
        handle = os.open(point, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSH))
        finally:
            os.close(handle)
    power_cut(guest)


def clean(guest: Guest) -> None:
    cgroup.kill(guest.name)
    mounts.unmount_below(guest.home)
    for image in (guest.disk_image, *(image for image, _ in guest.more_disks)):
        mounts.wait_for_loop(image)
    network.disconnect(guest.name)
    cgroup.remove(guest.name)
    for lock in Path("/run/systemd/nspawn/locks").glob(f"*{guest.name}*"):
        lock.unlink()


def destroy(guest: Guest) -> None:
    clean(guest)
    _forget(guest)


def _forget(guest: Guest) -> None:
    (guest.home / "guest.json").unlink(missing_ok=True)
    if guest.home.exists():
        shutil.rmtree(guest.home)


def enter_argv(guest: Guest, command: list[str]) -> list[str]:
    pid = leader_pid(guest)
    if pid is None:
        raise LabError(guest.name, f"is {state(guest)}", f"run `lab up {guest.name}`")
    # -r: if the lab runs in a chroot, the mount namespace alone leads to the machine's root.
    flags = ("-r", "-w", "-m", "-u", "-i", "-n", "-p", "-C")
    return ["nsenter", "-t", str(pid), *flags, "--", *command]
