"""Ports, addresses, netplan files, listeners and reachability of a host."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from spark_contract.status import NETPLAN_FILE, NETPLAN_TRIAL, RESTORE_UNIT

from spark_deploy.hosts.facts import HostFact, build_script, parse_sections
from spark_deploy.plan.types import Port, Ports

_PORTS_SCRIPT = r"""
echo '== addresses'; ip addr show
echo '== speeds'
for n in /sys/class/net/*; do
  speed=$(cat "$n/speed" 2>/dev/null) && echo "${n##*/} Speed: ${speed}Mb/s"
done
echo '== rdma'
for d in /sys/class/infiniband/*; do
  for n in "$d"/device/net/*; do
    [ -e "$n" ] || continue
    up=Down; grep -q ACTIVE "$d/ports/1/state" 2>/dev/null && up=Up
    echo "${d##*/} port 1 ==> ${n##*/} ($up)"
  done
done
echo '== gids'
for t in /sys/class/infiniband/*/ports/1/gid_attrs/types/*; do
  grep -q 'RoCE v2' "$t" 2>/dev/null || continue
  d=${t%/gid_attrs/*}
  echo "$(basename "${d%/ports/1}") ${t##*/} $(cat "$d/gids/${t##*/}")"
done
"""
_INTERFACE = re.compile(r"\d+: (?P<name>[^:@]+)(?:@\S+)?: <(?P<flags>[^>]*)> mtu (?P<mtu>\d+)")
_ADDRESS = re.compile(r"\s+inet ([0-9.]+/\d+) ")
_RDMA = re.compile(r"(?P<device>\S+) port \d+ ==> (?P<interface>\S+) \((?P<state>\w+)\)")
_SPEED = re.compile(r"(?P<interface>\S+) Speed: (?P<mbit_per_s>\d+)Mb/s")
_IPV4_PREFIX = "0000:0000:0000:0000:0000:ffff:"  # of an IPv4 address in a GID


class Fabric(HostFact[Ports]):
    def command(self) -> str:
        return build_script(_PORTS_SCRIPT)

    def process(self, output: Iterable[str]) -> Ports:
        sections = parse_sections(output)
        rdma = [match for match in map(_RDMA.match, sections["rdma"]) if match]
        devices = {row["interface"]: row["device"] for row in rdma if row["state"] == "Up"}
        rows = [match for match in map(_SPEED.match, sections["speeds"]) if match]
        speeds = {row["interface"]: int(row["mbit_per_s"]) for row in rows}
        gids = [line.split() for line in sections["gids"]]
        return Ports(
            tuple(
                Port(
                    interface=name,
                    up=up,
                    mtu=mtu,
                    speed_mbit_per_s=speeds.get(name),
                    addresses=addresses,
                    device=devices.get(name),
                    gid_index=_gid_index(gids, devices.get(name), addresses),
                )
                for name, up, mtu, addresses in _interfaces(sections["addresses"])
            )
        )


def _interfaces(lines: Iterable[str]) -> Iterator[tuple[str, bool, int, tuple[str, ...]]]:
    interfaces: list[tuple[re.Match[str], list[str]]] = []
    for line in lines:
        if interface := _INTERFACE.match(line):
            addresses: list[str] = []
            interfaces.append((interface, addresses))
        elif (address := _ADDRESS.match(line)) and interfaces:
            addresses.append(address[1])
    for interface, addresses in interfaces:
        flags = interface["flags"]
        if "LOOPBACK" not in flags:
            yield interface["name"], "LOWER_UP" in flags, int(interface["mtu"]), tuple(addresses)


def _gid_index(gids: list[list[str]], device: str | None, addresses: tuple[str, ...]) -> int | None:
    """Return the index of the RoCE v2 GID for the interface's first address."""
    if not addresses:
        return None
    a, b, c, d = map(int, addresses[0].partition("/")[0].split("."))
    address_gid = f"{_IPV4_PREFIX}{a:02x}{b:02x}:{c:02x}{d:02x}"
    for row_device, index, gid in (row for row in gids if len(row) == 3):
        if (row_device, gid) == (device, address_gid):
            return int(index)
    return None


_MAX_BYTES = 8192
_PROFILES = "/etc/NetworkManager/system-connections/*.nmconnection"
_NETPLAN_SCRIPT = rf"""
echo '== netplan'; command -v netplan
echo '== trial'; ls {NETPLAN_TRIAL} 2>/dev/null
# A restore deletes the file a few seconds before it removes the addresses.
systemctl is-active --quiet {RESTORE_UNIT}.service && echo restoring
echo '== managed-file'; head -c {_MAX_BYTES} {NETPLAN_FILE} 2>/dev/null
echo; echo '== other-files'
# An older NetworkManager profile takes precedence over netplan's new profile.
for f in /lib/netplan/*.yaml /etc/netplan/*.yaml /run/netplan/*.yaml {_PROFILES}; do
  [ -f "$f" ] && [ "${{f##*/}}" != '{NETPLAN_FILE.rpartition("/")[2]}' ] || continue
  for n in /sys/class/net/*; do
    grep -qwF -- "${{n##*/}}" "$f" && echo "${{n##*/}} $f"
  done
done
echo '== masters'
for n in /sys/class/net/*; do
  [ -e "$n/master" ] && echo "${{n##*/}} $(basename "$(readlink "$n/master")")"
done
"""


@dataclass(frozen=True, slots=True)
class Netplan:
    installed: bool
    in_trial: bool  # whether our trial of new addresses, or its restore, is running
    managed_file: str  # content of the file we wrote; "" if missing
    other_files: dict[str, str]  # interface: another file that configures it
    masters: dict[str, str]  # interface: the bridge or bond that contains it


class NetplanFiles(HostFact[Netplan]):  # only root can read netplan's files
    def command(self) -> str:
        return build_script(_NETPLAN_SCRIPT)

    def process(self, output: Iterable[str]) -> Netplan:
        sections = parse_sections(output)
        managed_file = sections.text("managed-file").rstrip("\n")
        return Netplan(
            installed=bool(sections.first("netplan")),
            in_trial=bool(sections.first("trial")),
            managed_file=f"{managed_file}\n" if managed_file else "",
            other_files=_parse_columns(sections["other-files"]),
            masters=_parse_columns(sections["masters"]),
        )


def _parse_columns(lines: Iterable[str]) -> dict[str, str]:
    rows = (line.split(maxsplit=1) for line in lines)
    return dict(row for row in rows if len(row) == 2)


@dataclass(frozen=True, slots=True)
class Listener:
    address: str
    port: int
    process: str
    pid: int
    cgroup: str

    @property
    def service(self) -> str:
        """Service whose gateway listens here; "" for other processes."""
        match = re.search(r"/spark-gateway(?:@|\\x40)([^/]+)\.service", self.cgroup)
        return match[1] if match else ""


def ports_script(ports: Sequence[int]) -> str:
    """Return a script that prints listeners, then the cgroup of each process.

    It takes the longest path in /proc/PID/cgroup, because with v1 controllers the v2 path is "/".
    """
    # Without ports, port 0 matches no listener; an empty filter would match all.
    sources = " or ".join(f"sport = :{port}" for port in ports) or "sport = :0"
    return rf"""
echo '== listeners'; listeners=$(ss -Hltnp {shlex.quote(f"( {sources} )")}); echo "$listeners"
echo '== listener-cgroups'
for pid in $(echo "$listeners" | grep -o 'pid=[0-9]*' | cut -d= -f2 | sort -u); do
  echo "$pid $(awk -F: 'length($3) > length(p) {{p = $3}} END {{print p}}' "/proc/$pid/cgroup")"
done
"""


def parse_listeners(lines: Iterable[str], cgroups: Iterable[str] = ()) -> tuple[Listener, ...]:
    cgroup_by_pid = _parse_columns(cgroups)
    listeners: dict[tuple[str, int], Listener] = {}
    for line in lines:
        fields = line.split()
        if len(fields) < 5 or fields[0] != "LISTEN":
            continue
        address, _, port = fields[3].rpartition(":")
        if not port.isdigit():
            continue
        owner = re.search(r'"([^"]*)",pid=(\d+)', line)
        process, pid = owner.groups() if owner else ("", "0")
        cgroup = cgroup_by_pid.get(pid, "")
        listeners[address, int(port)] = Listener(address, int(port), process, int(pid), cgroup)
    return tuple(listeners.values())


_HEADER_BYTES = 28  # IP and ICMP, part of the MTU
# Three packets, at most five seconds.
_PING = "ping -q -n -M do -c 3 -i 0.2 -W 1 -w 5"


class Reachability(HostFact[dict[str, str]]):
    """Whether full-size packets reach each address: "yes", "no", or "unknown" without ping."""

    def command(self, links: Sequence[tuple[str, str, int]]) -> str:
        """``links`` contains tuples of an interface, a member's address and an MTU."""
        tests = []
        for interface, address, mtu in links:
            size, target = mtu - _HEADER_BYTES, shlex.quote(address)
            ping = f"{_PING} -I {shlex.quote(interface)} -s {size} {target} >/dev/null 2>&1"
            tests.append(f"{{ if {ping}; then echo {address} yes; else echo {address} no; fi; }} &")
        unknown = [f"echo {address} unknown" for _, address, _ in links]
        start = "echo '== reach'\nif command -v ping >/dev/null; then"
        return build_script("\n".join((start, *tests, "wait", "else", *unknown, ":", "fi")))

    def process(self, output: Iterable[str]) -> dict[str, str]:
        return _parse_columns(parse_sections(output)["reach"])
