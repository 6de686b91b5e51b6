"""Who listens on the ports we are going to use (ss of iproute2)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_deploy.facts.machine.memory import is_ours


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket; process fields are empty where the kernel holds it."""

    address: str
    port: int
    process: str
    pid: int
    cgroup: str

    @property
    def ours(self) -> bool:
        """Whether one of our own units holds the socket."""
        return is_ours(self.cgroup)

    @property
    def service(self) -> str:
        """The service whose gateway holds the socket; empty when none of ours does."""
        found = re.search(r"/spark-gateway(?:@|\\x40)([^/]+)\.service", self.cgroup)
        return found[1] if found else ""


def script(ports: Sequence[int]) -> str:
    """List the listeners of some ports, then the cgroup of each process behind them.

    The longest path of /proc/PID/cgroup counts: with v1 controllers the v2 line says only "/".
    """
    wanted = " or ".join(f"sport = :{port}" for port in ports) or "sport = :0"
    return rf"""
echo '== listeners'; listeners=$(ss -Hltnp {shlex.quote(f"( {wanted} )")}); echo "$listeners"
echo '== listener-cgroups'
for pid in $(echo "$listeners" | grep -o 'pid=[0-9]*' | cut -d= -f2 | sort -u); do
  echo "$pid $(awk -F: 'length($3) > length(p) {{p = $3}} END {{print p}}' "/proc/$pid/cgroup")"
done
"""


def parse(lines: Iterable[str], cgroups: Iterable[str] = ()) -> tuple[Listener, ...]:
    """Read ``ss -ltnp`` with or without its heading; the same socket is listed once."""
    where = dict(line.split(maxsplit=1) for line in cgroups if len(line.split()) == 2)
    found: dict[tuple[str, int], Listener] = {}
    for line in lines:
        fields = line.split()
        if len(fields) < 5 or fields[0] != "LISTEN":
            continue
        address, _, port = fields[3].rpartition(":")
        if not port.isdigit():
            continue
        owner = re.search(r'"([^"]*)",pid=(\d+)', line)
        pid = owner.group(2) if owner else ""
        found[address, int(port)] = Listener(
            address=address,
            port=int(port),
            process=owner.group(1) if owner else "",
            pid=int(pid or 0),
            cgroup=where.get(pid, ""),
        )
    return tuple(found.values())
