"""Runs a guest with systemd-nspawn in namespaces that show only its cgroup tree; reboots it.

On cgroup v1 the boot runs in a cgroup namespace in the guest's cgroup; on v2 nspawn creates an
adjacent cgroup.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from lab import cgroup, mounts
from lab.guest import ENGINE_DIRS, Guest, supervising
from lab.network import namespace
from lab.shell import run

REBOOT_STATUS = 133  # systemd-nspawn --keep-unit: the guest reboots (systemd 252)


def boot_argv(guest: Guest, *, v2: bool) -> list[str]:
    namespaces = ["-m"] if v2 else ["-C", "-m"]
    words = ["unshare", *namespaces, "--propagation", "private", "--"]
    return [*words, sys.executable, "-m", "lab", "_boot", guest.name]


def nspawn_argv(guest: Guest, cgroup_bind: Path | None) -> list[str]:
    binds = [f"--bind={guest.disk}/{name}:/var/lib/{name}" for name in ENGINE_DIRS]
    binds += [f"--bind={point}:/{point.name}" for _, point in guest.more_disks]
    if cgroup_bind is not None:
        binds.append(f"--bind={cgroup_bind}:/sys/fs/cgroup")
    return [
        "systemd-nspawn", "-q", "--register=no", "--keep-unit",
        "-M", guest.name, "-D", str(guest.root),
        f"--network-namespace-path={namespace(guest.name)}",
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
    _unmount_other_guests(guest)
    v2 = cgroup.is_v2()
    bind = None
    if v2:
        _own_leaf_v2(guest)
    else:
        bind = _own_tree_v1(guest)
    os.environ.update(nspawn_environment(v2=v2))
    argv = nspawn_argv(guest, bind)
    os.execvp(argv[0], argv)


def _unmount_other_guests(guest: Guest) -> None:
    for home in guest.paths.guests.iterdir():
        if home != guest.home:
            mounts.unmount_below(home)
    netns_dir = Path("/run/netns")
    for point in mounts.mount_points(netns_dir):
        if point not in (netns_dir, namespace(guest.name)):
            run(["umount", "-l", point], check=False)


def _own_leaf_v2(guest: Guest) -> None:
    """Enter a new cgroup for nspawn; the old one already delegates controllers."""
    leaf = cgroup.seat(guest.name, "machine")
    cgroup.remove(leaf)
    cgroup.create(leaf)
    cgroup.enter(leaf)


def _own_tree_v1(guest: Guest) -> Path:
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
    seat = cgroup.seat(guest.name, "watch")
    cgroup.create(seat)
    cgroup.enter(seat)
    command = boot_argv(guest, v2=cgroup.is_v2())
    stopping = False
    with supervising(guest):
        while True:
            started = time.strftime("%F %T")
            with guest.console.open("ab") as console:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=console, stderr=console
                )

            def pass_on(_signal: int, _frame: FrameType | None, child: int = process.pid) -> None:
                nonlocal stopping
                stopping = True
                subprocess.run(["kill", "-TERM", str(child)], check=False)

            signal.signal(signal.SIGTERM, pass_on)
            status = process.wait()
            print(f"{started} booted, {time.strftime('%F %T')} ended, status {status}", flush=True)
            if status != REBOOT_STATUS or stopping:
                return status
