"""A cgroup tree for each guest and for the servers.

v1 has a hierarchy per controller (plus an empty ``unified``), v2 a single hierarchy, where a
cgroup that delegates controllers cannot contain a process (see :func:`process_cgroup`). Children
inherit the cgroup, so killing the tree kills a guest even without its supervisor.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from lab.errors import LabError

ROOT = Path("/sys/fs/cgroup")
# A second lab in a separate network namespace needs another name.
TREE = os.environ.get("SPARK_LAB_CGROUP", "lab")
_V2_CONTROLLERS = ("cpuset", "cpu", "io", "memory", "pids")


def is_v2(root: Path = ROOT) -> bool:
    return (root / "cgroup.controllers").exists()


def hierarchies(root: Path = ROOT) -> list[Path]:
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


def process_cgroup(name: str, role: str, root: Path = ROOT) -> str:
    """Return the cgroup of a guest's supervisor or nspawn, such as ``lab-3/watch``.

    On v1 both share ``lab-3``. On v2 ``lab-3`` delegates controllers to the cgroup that nspawn
    creates, so each process needs a leaf.
    """
    return f"{name}/{role}" if is_v2(root) else name


def create(name: str, root: Path = ROOT) -> None:
    v2 = is_v2(root)
    for hierarchy in hierarchies(root):
        directory = hierarchy
        for part in (TREE, *name.split("/")):
            if v2:
                _delegate(directory)
            directory = directory / part
            directory.mkdir(exist_ok=True)
            if (directory / "cpuset.cpus").exists() and not v2:
                _copy_cpuset(directory)


def _delegate(directory: Path) -> None:
    """Enable the controllers for children of a v2 cgroup, except in a container's top cgroup."""
    available = (directory / "cgroup.controllers").read_text().split()
    wanted = [f"+{name}" for name in _V2_CONTROLLERS if name in available]
    try:
        (directory / "cgroup.subtree_control").write_text(" ".join(wanted))
    except OSError as error:
        raise LabError(
            str(directory), f"cannot delegate {' '.join(wanted)}: {error.strerror}",
            "run the lab on a machine, real or virtual, and not in a container",
        ) from error  # fmt: skip


def enter(name: str) -> None:
    for hierarchy in hierarchies():
        (hierarchy / TREE / name / "cgroup.procs").write_text(str(os.getpid()))


def pids(name: str) -> set[int]:
    processes: set[int] = set()
    for hierarchy in hierarchies():
        for procs in (hierarchy / TREE / name).rglob("cgroup.procs"):
            processes.update(_read_pids(procs))
    return processes - {0}


def _read_pids(procs: Path) -> Iterator[int]:
    try:
        text = procs.read_text()
    except (FileNotFoundError, OSError):
        return  # the cgroup was removed meanwhile
    yield from (int(line) for line in text.split())


def cpu_s(name: str = "", root: Path = ROOT) -> float:
    """Return the CPU seconds of ``lab/name``, by default of the whole lab."""
    if is_v2(root):
        stat = root / TREE / name / "cpu.stat"
        words = stat.read_text().split() if stat.exists() else []
        return int(dict(zip(words[::2], words[1::2], strict=True)).get("usage_usec", "0")) / 1e6
    usage = root / "cpuacct" / TREE / name / "cpuacct.usage"
    return int(usage.read_text()) / 1e9 if usage.exists() else 0.0


def kill(name: str, *, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while running := pids(name):
        if os.getpid() in running:
            raise LabError(name, "the cgroup contains this process", "run the lab outside it")
        for pid in running:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise LabError(name, f"processes {sorted(running)} do not exit", "inspect with `ps`")
        time.sleep(0.02)


def remove(name: str) -> None:
    for hierarchy in hierarchies():
        tree = hierarchy / TREE / name
        for directory, _, _ in os.walk(tree, topdown=False):
            _rmdir_when_free(Path(directory))
        top = hierarchy / TREE
        if top.exists() and not any(entry.is_dir() for entry in top.iterdir()):
            _rmdir_when_free(top)


def _rmdir_when_free(directory: Path, timeout_s: float = 5) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LabError(str(directory), str(error), "check its cgroup.procs") from error
            time.sleep(0.02)
        else:
            return


def list_trees() -> list[str]:
    names: set[str] = set()
    for hierarchy in hierarchies():
        top = hierarchy / TREE
        if top.exists():
            names.update(entry.name for entry in top.iterdir() if entry.is_dir())
    return sorted(names)
