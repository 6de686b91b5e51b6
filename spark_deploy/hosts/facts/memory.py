"""Unified memory: how much is left, and which processes hold the rest.

On GB10 GPU allocations are charged to no process and no cgroup, so a process list alone never
adds up; ``MemAvailable`` is the figure that counts (/proc/meminfo, kernel documentation).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from spark_contract.free_blocks import FreeBlocks, parse_buddyinfo
from spark_contract.units import SHA256

from spark_deploy.hosts.facts.reading import Sections

SCRIPT = r"""
echo '== meminfo'; grep -E '^(MemTotal|MemAvailable|CmaTotal|CmaFree):' /proc/meminfo
echo '== buddyinfo'; getconf PAGESIZE; cat /proc/buddyinfo
echo '== driver-memory'; timeout 10 journalctl -k -b -q -o cat | grep -c NV_ERR_NO_MEMORY
echo '== processes'
ps -eo pid=,rss=,comm= --sort=-rss | head -n 40 | while read -r pid rss name; do
  [ "$rss" -ge 1048576 ] || break
  group=$(awk -F: 'length($3) > length(p) {p = $3} END {print p}' "/proc/$pid/cgroup")
  echo "$pid $rss $group $name"
done
"""

# Others name units and containers after this machine, too: "spark-vllm.service" is not ours.
_OURS = re.compile(
    r"/spark-(serve|switch|watch|gateway|return|job|share)(@|\\x40)|/spark-daily\.service"
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Figures of /proc/meminfo and /proc/buddyinfo in bytes."""

    total_bytes: int
    available_bytes: int  # less what a kernel with kexec handover counts as free and keeps
    cma_total_bytes: int
    cma_free_bytes: int  # above the total: free by count, but kept for the kernel's handover
    blocks: FreeBlocks | None  # None: only root may read them
    driver_failures: int  # lines of the kernel log since the boot


@dataclass(frozen=True, slots=True)
class Process:
    """A process with at least 1 GiB resident."""

    pid: int
    rss_bytes: int
    cgroup: str
    name: str

    @property
    def container_id(self) -> str:
        """Full id of the container it runs in, or ""."""
        return container_id(self.cgroup)

    @property
    def ours(self) -> bool:
        """Whether one of our own units holds it."""
        return is_ours(self.cgroup)


def container_id(cgroup: str) -> str:
    """Find a container's id in a cgroup path (docker, cgroup v1 or v2, both drivers)."""
    found = re.search(SHA256, cgroup)
    return found.group(0) if found else ""


def is_ours(cgroup: str) -> bool:
    """Tell whether a cgroup path belongs to a unit of ours, by its template."""
    return bool(_OURS.search(cgroup))


def parse_memory(sections: Sections) -> Memory:
    """Read the sections about memory."""
    kib: dict[str, int] = {}
    for line in sections.get("meminfo", ()):
        match = re.match(r"(\w+):\s+(\d+) kB", line)
        if match:
            kib[match.group(1)] = int(match.group(2))
    total, available, cma_total, cma_free = (
        kib.get(key, 0) * 1024 for key in ("MemTotal", "MemAvailable", "CmaTotal", "CmaFree")
    )
    page, *zones = [*sections.get("buddyinfo", ()), ""]
    failures = "".join(sections.get("driver-memory", ()))
    return Memory(
        total,
        available - max(0, cma_free - cma_total),
        cma_total,
        cma_free,
        parse_buddyinfo("\n".join(zones), int(page)) if page.isdigit() else None,
        int(failures) if failures.isdigit() else 0,
    )


def parse_processes(lines: Iterable[str]) -> tuple[Process, ...]:
    """Read the ``processes`` section: pid, RSS in KiB, cgroup path, name (may hold blanks)."""
    found = []
    for line in lines:
        pid, rss_kib, cgroup, name = [*line.split(maxsplit=3), "", "", "", ""][:4]
        if pid.isdigit() and rss_kib.isdigit():
            found.append(Process(int(pid), int(rss_kib) * 1024, cgroup, name))
    return tuple(found)
