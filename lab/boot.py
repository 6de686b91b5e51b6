"""Starts systemd-nspawn inside namespaces where the guest sees only its own cgroup tree.

Runs in a fresh mount namespace (see :func:`boot_argv`). On cgroup v1 it is in the guest's cgroup
and has a cgroup namespace as well; on v2 nspawn makes that by itself, and has to know where in the
machine's tree it stands, because it makes the guest's cgroup beside its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lab import cgroup, mounts
from lab.guest import ENGINE_DIRS, Guest
from lab.network import namespace
from lab.shell import run

REBOOT_STATUS = 133  # systemd-nspawn --keep-unit: the guest asked for a reboot (seen with 252)


def boot_argv(guest: Guest, *, v2: bool) -> list[str]:
    namespaces = ["-m"] if v2 else ["-C", "-m"]
    words = ["unshare", *namespaces, "--propagation", "private", "--"]
    return [*words, sys.executable, "-m", "lab", "_boot", guest.name]


def nspawn_argv(guest: Guest, cgroup_bind: Path | None) -> list[str]:
    """Return systemd-nspawn's command line.

    ``cgroup_bind`` is the prepared v1 tree; a v2 machine leaves the delegation to nspawn.
    """
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
    """Return what nspawn reads from its environment.

    Without API_VFS_WRITABLE=network dockerd cannot enable IP forwarding.
    """
    return {
        "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network",
        "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1" if v2 else "0",
        "SYSTEMD_NSPAWN_USE_CGNS": "1",
    }


def boot(guest: Guest) -> None:
    _let_go_of_others(guest)
    v2 = cgroup.is_v2()
    bind = None
    if v2:
        _own_leaf_v2(guest)
    else:
        bind = _own_tree_v1(guest)
    os.environ.update(nspawn_environment(v2=v2))
    argv = nspawn_argv(guest, bind)
    os.execvp(argv[0], argv)


def _let_go_of_others(guest: Guest) -> None:
    """Unmount other guests' files here: this copy of the mount table would keep them busy."""
    for home in guest.paths.guests.iterdir():
        if home != guest.home:
            mounts.unmount_below(home)
    netns_dir = Path("/run/netns")
    for point in mounts.mount_points(netns_dir):
        if point not in (netns_dir, namespace(guest.name)):
            run(["umount", "-l", point], check=False)


def _own_leaf_v2(guest: Guest) -> None:
    """Enter a new cgroup for nspawn; what an earlier boot left hands controllers down already."""
    leaf = cgroup.seat(guest.name, "machine")
    cgroup.remove(leaf)
    cgroup.create(leaf)
    cgroup.enter(leaf)


def _own_tree_v1(guest: Guest) -> Path:
    """Mount this cgroup namespace's v1 hierarchies and return the tree for the guest.

    The guest's init goes into ``payload`` of the systemd hierarchy; were it shown the parent, its
    /proc/1/cgroup would point outside and systemctl would not find a pid's unit.
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
