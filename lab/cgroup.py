"""One cgroup tree per guest and one for the servers, so that clean-up goes by cgroup.

Two layouts: *v1* has one hierarchy per controller under /sys/fs/cgroup (plus an empty ``unified``),
*v2* is a single one, where a cgroup that hands controllers down may hold no process itself (see
:func:`seat`). A process that is started through :func:`enter` takes everything it starts with it,
so killing the tree ends a guest whatever became of its supervisor.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from lab.errors import LabError

ROOT = Path("/sys/fs/cgroup")
# A second lab, in a network namespace of its own, needs another name (the lab's tests do that).
TREE = os.environ.get("SPARK_LAB_CGROUP", "lab")
_V2_CONTROLLERS = ("cpuset", "cpu", "io", "memory", "pids")


def is_v2(root: Path = ROOT) -> bool:
    """Tell whether ``root`` is a single v2 hierarchy."""
    return (root / "cgroup.controllers").exists()


def hierarchies(root: Path = ROOT) -> list[Path]:
    """Return the mount points of all hierarchies; symlinks such as ``cpu`` are left out."""
    if is_v2(root):
        return [root]
    return sorted(
        entry
        for entry in root.iterdir()
        if entry.is_dir() and not entry.is_symlink() and (entry / "cgroup.procs").exists()
    )


def _copy_cpuset(directory: Path) -> None:
    """Copy the cpuset down: an empty v1 cpuset refuses every process."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        target = directory / name
        if target.exists() and not target.read_text().strip():
            target.write_text((directory.parent / name).read_text())


def seat(name: str, role: str, root: Path = ROOT) -> str:
    """Return the cgroup for one of a guest's two processes on this machine: ``lab-3/watch``.

    On v1 both share ``lab-3``, which the guest sees as its root. On v2 that one has to hand the
    controllers down to what nspawn makes for the guest, so each process gets a leaf of its own.
    """
    return f"{name}/{role}" if is_v2(root) else name


def create(name: str, root: Path = ROOT) -> None:
    """Have the cgroup ``lab/name`` in every hierarchy; a name may have parts: ``lab-3/watch``."""
    v2 = is_v2(root)
    for hierarchy in hierarchies(root):
        directory = hierarchy
        for part in (TREE, *name.split("/")):
            if v2:
                _hand_down(directory)
            directory = directory / part
            directory.mkdir(exist_ok=True)
            if (directory / "cpuset.cpus").exists() and not v2:
                _copy_cpuset(directory)


def _hand_down(directory: Path) -> None:
    """Give the controllers to the children; a v2 cgroup gives them none by itself.

    Raises:
        LabError: processes sit in ``directory``, as in the top cgroup of a container.
    """
    available = (directory / "cgroup.controllers").read_text().split()
    wanted = [f"+{name}" for name in _V2_CONTROLLERS if name in available]
    try:
        (directory / "cgroup.subtree_control").write_text(" ".join(wanted))
    except OSError as error:
        raise LabError(
            str(directory), f"cannot hand {' '.join(wanted)} down: {error.strerror}",
            "run the lab on a machine, real or virtual, and not in a container",
        ) from error  # fmt: skip


def enter(name: str) -> None:
    """Move this process into ``lab/name`` in every hierarchy; its children follow."""
    for hierarchy in hierarchies():
        (hierarchy / TREE / name / "cgroup.procs").write_text(str(os.getpid()))


def pids(name: str) -> set[int]:
    """Return every process in the tree ``lab/name``."""
    found: set[int] = set()
    for hierarchy in hierarchies():
        for procs in (hierarchy / TREE / name).rglob("cgroup.procs"):
            found.update(_read_pids(procs))
    return found - {0}


def _read_pids(procs: Path) -> Iterator[int]:
    try:
        text = procs.read_text()
    except (FileNotFoundError, OSError):
        return  # the cgroup went away while we looked: it holds no process any more
    yield from (int(line) for line in text.split())


def cpu_s(root: Path = ROOT) -> float:
    """Return the processor's seconds that guests and servers took since their trees were made."""
    if is_v2(root):
        stat = root / TREE / "cpu.stat"
        words = stat.read_text().split() if stat.exists() else []
        return int(dict(zip(words[::2], words[1::2], strict=True)).get("usage_usec", "0")) / 1e6
    usage = root / "cpuacct" / TREE / "cpuacct.usage"
    return int(usage.read_text()) / 1e9 if usage.exists() else 0.0


def kill(name: str, *, timeout_s: float = 20) -> None:
    """SIGKILL everything in ``lab/name`` until nothing is left.

    Raises:
        LabError: processes survive, or the caller itself is among them.
    """
    deadline = time.monotonic() + timeout_s
    while left := pids(name):
        if os.getpid() in left:
            raise LabError(name, "asked to kill its own cgroup", "run the lab from outside")
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise LabError(name, f"processes {sorted(left)} do not die", "look at them with ps")
        time.sleep(0.02)


def remove(name: str) -> None:
    """Remove the (empty) tree ``lab/name``, and ``lab`` with the last one."""
    for hierarchy in hierarchies():
        tree = hierarchy / TREE / name
        for directory, _, _ in os.walk(tree, topdown=False):
            _rmdir_when_free(Path(directory))
        top = hierarchy / TREE
        if top.exists() and not any(entry.is_dir() for entry in top.iterdir()):
            _rmdir_when_free(top)


def _rmdir_when_free(directory: Path, timeout_s: float = 5) -> None:
    """Remove one cgroup; the kernel may need a moment after its last process died."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LabError(str(directory), str(error), "see which process is in it") from error
            time.sleep(0.02)
        else:
            return


def trees() -> list[str]:
    """Return the names under ``lab/`` in any hierarchy (guests and ``host``)."""
    names: set[str] = set()
    for hierarchy in hierarchies():
        top = hierarchy / TREE
        if top.exists():
            names.update(entry.name for entry in top.iterdir() if entry.is_dir())
    return sorted(names)
