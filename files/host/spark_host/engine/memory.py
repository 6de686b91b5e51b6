"""The host's memory: available bytes, fragmentation, and the wait before an engine starts."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from spark_contract.machine import GIB, FreeBlocks, parse_buddyinfo
from spark_contract.release import Release
from spark_contract.tool import LIMIT, PHASE, WAITED, HostToolError

from spark_host.system import docker, programs
from spark_host.system.programs import Report

_POLL_INTERVAL_S = 2.0
_LOW_SAMPLES = 2  # successive samples, because a single sample may be a spike


def meminfo() -> dict[str, int]:
    source = Path(os.environ.get("SPARK_MEMINFO", "/proc/meminfo"))
    values = {}
    for line in source.read_text().splitlines():
        key, _, rest = line.partition(":")
        fields = rest.split()
        if fields:
            values[key] = int(fields[0]) * (1024 if fields[-1] == "kB" else 1)
    return values


def available_bytes() -> int:
    """Return the memory that is available to a new process.

    A kernel with kexec handover treats the reserve as free, so CmaFree exceeds CmaTotal.
    """
    values = meminfo()
    reserve = values.get("CmaFree", 0) - values.get("CmaTotal", 0)
    return values["MemAvailable"] - max(0, reserve)


def _proc_path(name: str) -> Path:
    return Path(os.environ.get("SPARK_PROC", "/proc")) / name


def read_free_blocks() -> FreeBlocks | None:
    try:
        return parse_buddyinfo(_proc_path("buddyinfo").read_text(), os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return None


def defragment() -> str:
    """Drop clean caches and compact memory; return the error, or "".

    Compaction cannot move directory entries and inodes, so they are dropped too.
    """
    programs.read_output("sync")  # dirty pages cannot be dropped
    try:
        _proc_path("sys/vm/drop_caches").write_text("3\n")
        _proc_path("sys/vm/compact_memory").write_text("1\n")
    except OSError as error:
        return str(error)
    return ""


def prepare_blocks(release: Release, report: Report) -> None:
    blocks = read_free_blocks()
    if blocks is None or not (blocks.is_low(release.memory.needed_bytes) or blocks.is_fragmented):
        return
    report(f"{PHASE}memory {blocks}: dropping caches and compacting memory")
    error = defragment()
    suffix = f" ({error})" if error else ""
    report(f"{PHASE}memory now {read_free_blocks()}{suffix}")


@dataclass(slots=True)
class MemoryFloor:
    """The memory that must stay available, and the lowest measured value."""

    bytes: int
    lowest_bytes: int | None = None
    low_samples: int = 0

    def check(self, available: int) -> str | None:
        """Add a sample; return a message if the available memory stays below the floor."""
        if self.lowest_bytes is None or available < self.lowest_bytes:
            self.lowest_bytes = available
        self.low_samples = self.low_samples + 1 if available < self.bytes else 0
        if self.low_samples < _LOW_SAMPLES:
            return None
        text = f"{available / GIB:.2f} GiB of memory is available"
        return f"{text}, but the floor is {self.bytes / GIB:.2f} GiB"


def wait_for_memory(release: Release, report: Report, poll_s: float = _POLL_INTERVAL_S) -> None:
    """Wait until the service has no container and the release's memory is available.

    A Spark frees memory long after a process has exited. Raises HostToolError after ``wait_s``.
    """
    needed_bytes, wait_s = release.memory.needed_bytes, release.memory.wait_s
    start = time.monotonic()
    while True:
        containers = docker.engine_containers(release.service)
        available = available_bytes()
        if not containers and available >= needed_bytes:
            return
        waited = time.monotonic() - start
        if containers:
            obstacle = f"container {', '.join(containers)} still exists"
        else:
            obstacle = f"{available / GIB:.1f} GiB available, {needed_bytes / GIB:.1f} GiB needed"
        if waited >= wait_s:
            fix = f"stop the largest processes: {_largest_processes()}"
            if containers:
                command = f"docker rm -f {' '.join(containers)}"
                fix = f"run `{command}`; if it hangs or fails, reboot the host"
            raise HostToolError("memory", f"{obstacle} after {waited:.0f} s", fix)
        report(f"{PHASE}memory {WAITED}{waited:.0f} {LIMIT}{wait_s:.0f} {obstacle}")
        time.sleep(min(poll_s, max(0.0, wait_s - waited)))


def _largest_processes(count: int = 3) -> str:
    processes = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = status.read_text().splitlines()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        resident_kb = int(fields.get("VmRSS", "0 kB").split()[0])
        processes.append((resident_kb, fields["Name"].strip(), status.parent.name))
    largest = sorted(processes, reverse=True)[:count]
    return ", ".join(f"{name} (pid {pid}, {kb / (1 << 20):.1f} GiB)" for kb, name, pid in largest)
