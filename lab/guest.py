"""Creates, boots and destroys a guest and its disk."""

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
from types import FrameType

from lab import cgroup, mounts, network
from lab.errors import LabError
from lab.paths import LabPaths, guest_index, guest_ip
from lab.shell import run
from lab.variant import read as read_variant

REBOOT_STATUS = 133  # systemd-nspawn --keep-unit: the guest reboots (systemd 252)
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
    def extra_disks(self) -> list[tuple[Path, Path]]:
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
    for image, point in guest.extra_disks:
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
def supervisor_lock(guest: Guest) -> Iterator[None]:
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


def cut_power_without_sync(guest: Guest) -> None:
    """Shut ext4 down without flushing its journal, so that unsynced data is lost; then kill."""
    for point in (guest.disk, *(point for _, point in guest.extra_disks)):
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
    for image in (guest.disk_image, *(image for image, _ in guest.extra_disks)):
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
        raise LabError(guest.name, f"the guest is {state(guest)}", f"run `lab up {guest.name}`")
    # -r: if the lab runs in a chroot, the mount namespace alone leads to the machine's root.
    flags = ("-r", "-w", "-m", "-u", "-i", "-n", "-p", "-C")
    return ["nsenter", "-t", str(pid), *flags, "--", *command]


def boot_argv(guest: Guest, *, v2: bool) -> list[str]:
    namespaces = ["-m"] if v2 else ["-C", "-m"]
    unshare = ["unshare", *namespaces, "--propagation", "private", "--"]
    return [*unshare, sys.executable, "-m", "lab", "_boot", guest.name]


def nspawn_argv(guest: Guest, cgroup_bind: Path | None) -> list[str]:
    binds = [f"--bind={guest.disk}/{name}:/var/lib/{name}" for name in ENGINE_DIRS]
    binds += [f"--bind={point}:/{point.name}" for _, point in guest.extra_disks]
    if cgroup_bind is not None:
        binds.append(f"--bind={cgroup_bind}:/sys/fs/cgroup")
    return [
        "systemd-nspawn", "-q", "--register=no", "--keep-unit",
        "-M", guest.name, "-D", str(guest.root),
        f"--network-namespace-path={network.namespace(guest.name)}",
        "--capability=all", "--system-call-filter=@keyring bpf @privileged",
        *binds,
        "--resolv-conf=off", "--timezone=off", "--link-journal=no", "--console=pipe", "--boot",
    ]  # fmt: skip


def nspawn_environment(*, v2: bool) -> dict[str, str]:
    return {
        "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network",  # lets dockerd enable IP forwarding
        "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1" if v2 else "0",
        "SYSTEMD_NSPAWN_USE_CGNS": "1",
    }


def boot(guest: Guest) -> None:
    """Run the guest with systemd-nspawn in namespaces that show only its cgroup tree.

    On cgroup v1 it runs in a cgroup namespace in the guest's cgroup; on v2 nspawn creates an
    adjacent cgroup.
    """
    _unmount_other_guests(guest)
    v2 = cgroup.is_v2()
    bind = None
    if v2:
        _enter_leaf_v2(guest)
    else:
        bind = _mount_tree_v1(guest)
    os.environ.update(nspawn_environment(v2=v2))
    argv = nspawn_argv(guest, bind)
    os.execvp(argv[0], argv)


def _unmount_other_guests(guest: Guest) -> None:
    for home in guest.paths.guests.iterdir():
        if home != guest.home:
            mounts.unmount_below(home)
    netns_dir = Path("/run/netns")
    for point in mounts.mount_points(netns_dir):
        if point not in (netns_dir, network.namespace(guest.name)):
            run(["umount", "-l", point], check=False)


def _enter_leaf_v2(guest: Guest) -> None:
    """Enter a new cgroup for nspawn; the old one already delegates controllers."""
    leaf = cgroup.process_cgroup(guest.name, "machine")
    cgroup.remove(leaf)
    cgroup.create(leaf)
    cgroup.enter(leaf)


def _mount_tree_v1(guest: Guest) -> Path:
    """Mount this cgroup namespace's v1 hierarchies and return the tree for the guest.

    The guest's init runs in ``payload`` of the systemd hierarchy, the guest's root: otherwise
    /proc/1/cgroup points outside and systemctl finds no unit for a pid.
    """
    mine, shown = guest.home / "cg", guest.home / "cg2"
    names = [hierarchy.name for hierarchy in cgroup.hierarchies() if hierarchy.name != "unified"]
    for directory in (mine, shown):
        run(["mount", "-t", "tmpfs", "tmpfs", directory])
    for name in names:
        (mine / name).mkdir()
        options = "none,name=systemd" if name == "systemd" else name
        run(["mount", "-t", "cgroup", "-o", options, "cgroup", mine / name])
    for name in names:
        source = mine / name
        if name == "systemd":
            source = source / "payload"
            source.mkdir(exist_ok=True)
        (shown / name).mkdir()
        run(["mount", "--bind", source, shown / name])
    run(["mount", "--rbind", mine, "/sys/fs/cgroup"])
    return shown


def supervise(guest: Guest) -> int:
    watch = cgroup.process_cgroup(guest.name, "watch")
    cgroup.create(watch)
    cgroup.enter(watch)
    command = boot_argv(guest, v2=cgroup.is_v2())
    stopping = False
    with supervisor_lock(guest):
        while True:
            started = time.strftime("%F %T")
            with guest.console.open("ab") as console:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=console, stderr=console
                )

            def forward(_signal: int, _frame: FrameType | None, child: int = process.pid) -> None:
                nonlocal stopping
                stopping = True
                subprocess.run(["kill", "-TERM", str(child)], check=False)

            signal.signal(signal.SIGTERM, forward)
            status = process.wait()
            print(f"{started} booted, {time.strftime('%F %T')} ended, status {status}", flush=True)
            if status != REBOOT_STATUS or stopping:
                return status
