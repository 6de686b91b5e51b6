"""What preflight reads of a host, in one command that changes nothing."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spark_contract import documents
from spark_contract.documents import DocumentError
from spark_contract.errors import Problem
from spark_contract.free_blocks import FreeBlocks, parse_buddyinfo
from spark_contract.machine import (
    BOOT_ID,
    DRIVER_LIBRARIES,
    REBOOT_MARKER,
    REBOOT_PACKAGES,
    BootSigns,
    library_versions,
)
from spark_contract.paths import DAILY, RELEASES_DIR, Paths
from spark_contract.records import DailyLook, Stopped
from spark_contract.tool import STAND_IN
from spark_contract.units import MAIN_SERVICE, SERVE

from spark_deploy.hosts.disk import (
    Above,
    Place,
    Reclaimable,
    Stored,
    disk_script,
    parse_above,
    parse_places,
    parse_reclaimable,
    parse_stored,
    stored_script,
)
from spark_deploy.hosts.docker_facts import (
    CONTAINERS_SCRIPT,
    Container,
    images_script,
    parse_containers,
    parse_silent,
)
from spark_deploy.hosts.facts import (
    SERVING_SCRIPT,
    HostFact,
    Sections,
    as_root,
    build_script,
    container_id,
    first_line,
    is_managed,
    parse_key_values,
    parse_sections,
)
from spark_deploy.hosts.gpu import GPU_SCRIPT, GpuState, parse_gpu
from spark_deploy.hosts.network import Listener, parse_listeners, ports_script

IDENTITY_SCRIPT = rf"""
echo '== uname'; uname -m; uname -r
echo '== kernel-parameters'; cat /proc/cmdline
echo '== os-release'; cat /etc/os-release
echo '== dgx-release'; [ -r /etc/dgx-release ] && grep -v SERIAL /etc/dgx-release
echo '== pci'
for device in /sys/bus/pci/devices/*; do
  [ -r "$device/vendor" ] || continue
  read -r v <"$device/vendor"; read -r d <"$device/device"
  echo "${{v#0x}}:${{d#0x}}"
done
echo '== kernels'
for image in /boot/vmlinuz-*; do [ -e "$image" ] && echo "${{image##*/vmlinuz-}}"; done
echo '== host-key'
ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub 2>/dev/null | cut -d' ' -f2
echo '== clock'; date +%s
echo '== reboot'; [ -e {REBOOT_MARKER} ] && {{ echo required; cat {REBOOT_PACKAGES}; }}
echo '== driver-libraries'; ls {DRIVER_LIBRARIES} 2>/dev/null
"""


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """What the host says about itself, without asking any driver."""

    arch: str
    kernel: str
    os_id: str
    os_version: str
    os_name: str
    dgx_release: dict[str, str]  # empty: no /etc/dgx-release
    pci: tuple[str, ...]  # vendor:device of each function, as lspci -n prints it
    host_key: str  # fingerprint of the key that SSH shows; "" where there is none
    boot: BootSigns
    kernel_parameters: tuple[str, ...] = ()  # what this boot was started with
    clock_ahead_s: float = 0.0  # of the controller's; below zero: behind it


def parse_identity(sections: Sections, gpu: GpuState) -> HostIdentity:
    arch, kernel = [*sections.get("uname", ()), "", ""][:2]
    os_release = parse_key_values(sections.get("os-release", ()))
    reboot = list(sections.get("reboot", ()))
    libraries = library_versions(sections.get("driver-libraries", ()))
    return HostIdentity(
        arch=arch,
        kernel=kernel,
        os_id=os_release.get("ID", ""),
        os_version=os_release.get("VERSION_ID", ""),
        os_name=os_release.get("PRETTY_NAME", ""),
        dgx_release=parse_key_values(sections.get("dgx-release", ())),
        pci=tuple(sections.get("pci", ())),
        host_key=first_line(sections, "host-key"),
        boot=BootSigns(
            kernel=kernel,
            kernels=tuple(sections.get("kernels", ())),
            marked=bool(reboot),
            packages=tuple(line for line in reboot[1:] if line),
            module=gpu.module_version,
            libraries=libraries or tuple(one.driver_version for one in gpu.gpus),
            mismatch=gpu.smi == "mismatch",
        ),
        kernel_parameters=tuple(first_line(sections, "kernel-parameters").split()),
        clock_ahead_s=float(clock) - time.time()
        if (clock := first_line(sections, "clock"))
        else 0.0,
    )


class RebootedFor(HostFact[str]):
    """The reason of the last reboot of ours that is still pending; empty when there is none.

    It is written down before the reboot, under the id of the boot that was to end: while that one
    goes on, the reboot never came about, and nothing was tried.
    """

    default = str

    def command(self, path: str) -> str:
        marker = shlex.quote(path)
        return (
            f'[ -f {marker} ] && [ "$(head -n 1 {marker})" != "$(cat {BOOT_ID})" ] '
            f"&& tail -n +2 {marker} || true"
        )

    def process(self, output: Iterable[str]) -> str:
        return "\n".join(output).strip()


MEMORY_SCRIPT = r"""
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


@dataclass(frozen=True, slots=True)
class Memory:
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
        return is_managed(self.cgroup)


def parse_memory(sections: Sections) -> Memory:
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
    found = []
    for line in lines:
        pid, rss_kib, cgroup, name = [*line.split(maxsplit=3), "", "", "", ""][:4]
        if pid.isdigit() and rss_kib.isdigit():
            found.append(Process(int(pid), int(rss_kib) * 1024, cgroup, name))
    return tuple(found)


def audit_script(folder: str = "/var/lib/dpkg") -> str:
    """Return the audit; while dpkg's lock is held, packages in progress are left out."""
    return f"""
echo '== dpkg-audit'
busy=
for lock in {folder}/lock-frontend {folder}/lock; do
  inode=$(stat -c %i "$lock" 2>/dev/null) && grep -q ":$inode " /proc/locks && busy=yes
done
[ -n "$busy" ] || dpkg --audit
"""


_STOPPED = str(Paths(Path("/")).stopped(MAIN_SERVICE).parent)


def stopped_script(folder: str = _STOPPED) -> str:
    return f"""
echo '== stopped'
for file in {folder}/*.json; do
  [ -f "$file" ] && {{ basename "$file" .json; head -c 4096 "$file" | tr -d '\\n'; echo; }}
done
"""


_DPKG = rf"""
echo '== stubs'
dpkg-query -W -f '${{db:Status-Abbrev}} ${{Package}} ${{Version}}\n' | grep -F {STAND_IN}
echo '== daily'; head -c 65536 {DAILY} 2>/dev/null; echo
echo '== tailscale'; tailscale ip -4 2>&1 | head -n 1
"""


def engine_memory_script(folder: str = RELEASES_DIR) -> str:
    before, after = SERVE.of("@").split("@@")
    return rf"""
echo '== engine-memory'
systemctl list-units --plain --no-legend --state=active,activating '{SERVE.of("*")}' |
  while read -r unit _; do
    name=${{unit#{before}@}}
    echo "$unit $(head -c 1048576 "{folder}/${{name%{after}}}/release.json" 2>/dev/null |
      tr -d ' \n' | sed -n 's/.*"memory":{{[^}}]*"needed_bytes":\([0-9]*\).*/\1/p')"
  done
"""


@dataclass(frozen=True, slots=True)
class Survey:
    user: str  # login name when sudo asks for a password, else ""
    identity: HostIdentity
    gpu: GpuState
    memory: Memory
    processes: tuple[Process, ...]
    places: tuple[Place, ...]
    reclaimable: tuple[Reclaimable, ...]
    listeners: tuple[Listener, ...]
    containers: tuple[Container, ...]
    docker_silent: str  # state of the unit whose daemon did not answer; "" when it did
    broken_packages: tuple[str, ...]  # what dpkg --audit names
    serving: tuple[str, ...]  # our units that are up
    stub_packages: tuple[str, ...]  # "name version" of stand-ins
    images: tuple[str, ...]  # those of the plan that are there
    tailscale: str  # the host's address in its tailnet, or what the command said instead
    stored: Stored  # weights that need no room again
    daily: tuple[Problem, ...] = ()  # what the host's own daily look found
    above: tuple[Above, ...] = ()  # the folders above our places
    stopped: Mapping[str, Stopped] = field(default_factory=dict)  # by service: on purpose
    engine_bytes: Mapping[str, int] = field(default_factory=dict)  # planned, by unit that is up

    @property
    def obtainable_bytes(self) -> int | None:
        """Memory that is available once our engines stop; ``None`` where a plan is unknown."""
        if not set(self.serving) <= set(self.engine_bytes):
            return None
        held_bytes = sum(self.engine_bytes[unit] for unit in self.serving)
        return min(self.memory.total_bytes, self.memory.available_bytes + held_bytes)

    @property
    def sudo_works(self) -> bool:
        return not self.user

    @property
    def stubbed(self) -> tuple[str, ...]:
        """Every stand-in met on this host: nothing proven with one says anything of a Spark."""
        found = list(self.stub_packages)
        driver = self.gpu.driver_version
        if driver.endswith(STAND_IN):
            found.append(f"driver {driver}")
        return tuple(found)


class HostSurvey(HostFact[Survey]):
    """One look at the whole host; run it without pyinfra's sudo, it finds its own way to root."""

    def command(
        self,
        paths: Sequence[str],
        ports_wanted: Sequence[int],
        images: Sequence[str] = (),
        shared_paths: Sequence[str] = (),
        look_in: Sequence[str] = (),
    ) -> str:
        return as_root(
            build_script(
                IDENTITY_SCRIPT,
                GPU_SCRIPT,
                MEMORY_SCRIPT,
                stored_script(paths, look_in),
                ports_script(ports_wanted),
                SERVING_SCRIPT,
                engine_memory_script(),
                audit_script(),
                stopped_script(),
                _DPKG,
                # Half of the time is docker's.
                parallel=(
                    disk_script(paths, shared_paths),
                    CONTAINERS_SCRIPT,
                    images_script(images),
                ),
            )
        )

    def process(self, output: list[str]) -> Survey:
        found = parse_sections(output)
        sudo = found.get("sudo", ["no"])
        state = parse_gpu(found)
        return Survey(
            user=(sudo[1] if len(sudo) > 1 else "?") if sudo[0] == "no" else "",
            identity=parse_identity(found, state),
            gpu=state,
            memory=parse_memory(found),
            processes=parse_processes(found.get("processes", ())),
            places=parse_places(found.get("places", ())),
            reclaimable=parse_reclaimable(found),
            listeners=parse_listeners(
                found.get("listeners", ()), found.get("listener-cgroups", ())
            ),
            containers=parse_containers(found.get("containers", ())),
            docker_silent=parse_silent(found.get("containers", ())),
            broken_packages=parse_audit(found.get("dpkg-audit", ())),
            serving=tuple(line for line in found.get("serving", ()) if line),
            stub_packages=tuple(
                " ".join(line.split()[1:3]) for line in found.get("stubs", ()) if line[:2] == "ii"
            ),
            images=tuple(found.get("images", ())),
            tailscale=first_line(found, "tailscale"),
            stored=parse_stored(found),
            daily=_parse_daily(found.get("daily", ())),
            above=parse_above(found.get("above", ())),
            stopped=dict(_parse_stopped(found.get("stopped", ()))),
            engine_bytes=_parse_engine_bytes(found.get("engine-memory", ())),
        )


def _parse_engine_bytes(lines: Sequence[str]) -> dict[str, int]:
    pairs = (line.partition(" ") for line in lines)
    return {unit: int(planned) for unit, _, planned in pairs if planned.isdigit()}


def _parse_daily(lines: Sequence[str]) -> tuple[Problem, ...]:
    try:
        return documents.parse(DailyLook, "\n".join(lines)).problems
    except DocumentError:  # there was none yet, or it was cut short
        return ()


def _parse_stopped(lines: Sequence[str]) -> Iterator[tuple[str, Stopped]]:
    """Read names of services, each with its record below it; that there is one keeps it down."""
    for name, said in zip(lines[::2], lines[1::2], strict=False):
        try:
            yield name, documents.parse(Stopped, said)
        except DocumentError:
            yield name, Stopped(None, "an unknown time")


def parse_audit(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(line.split()[0] for line in lines if line.startswith(" ") and line.strip())
