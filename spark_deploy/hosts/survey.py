"""Read everything that preflight checks on a host, with a single command."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spark_contract import machine, units
from spark_contract.paths import DAILY, RELEASES_DIR, Paths
from spark_contract.records import DailyReport, Stopped
from spark_contract.tool import LAB_STUB_SUFFIX, Problem
from spark_contract.units import MAIN_SERVICE, SERVE

from spark_deploy.hosts import disk, docker_facts, facts, gpu, network

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
echo '== reboot'
[ -e {machine.REBOOT_MARKER} ] && {{ echo required; cat {machine.REBOOT_PACKAGES}; }}
echo '== driver-libraries'; ls {machine.DRIVER_LIBRARIES} 2>/dev/null
"""


@dataclass(frozen=True, slots=True)
class HostIdentity:
    arch: str
    kernel: str
    os_id: str
    os_version: str
    os_name: str
    dgx_release: dict[str, str]  # empty if there is no /etc/dgx-release
    pci: tuple[str, ...]  # vendor:device of each device, as lspci -n prints it
    host_key: str  # fingerprint of the SSH host key; "" if there is none
    boot: machine.BootSigns
    kernel_parameters: tuple[str, ...] = ()  # of this boot
    clock_ahead_s: float = 0.0  # compared with the controller; negative if behind


def parse_identity(sections: facts.Sections, gpu_state: gpu.GpuState) -> HostIdentity:
    arch, kernel = [*sections["uname"], "", ""][:2]  # missing lines are empty
    os_release = facts.parse_key_values(sections["os-release"])
    reboot, clock = sections["reboot"], sections.first("clock")
    libraries = machine.library_versions(sections["driver-libraries"])
    return HostIdentity(
        arch=arch,
        kernel=kernel,
        os_id=os_release.get("ID", ""),
        os_version=os_release.get("VERSION_ID", ""),
        os_name=os_release.get("PRETTY_NAME", ""),
        dgx_release=facts.parse_key_values(sections["dgx-release"]),
        pci=tuple(sections["pci"]),
        host_key=sections.first("host-key"),
        boot=machine.BootSigns(
            kernel=kernel,
            kernels=tuple(sections["kernels"]),
            has_reboot_marker=bool(reboot),
            packages=tuple(line for line in reboot[1:] if line),
            module=gpu_state.module_version,
            libraries=libraries or tuple(card.driver_version for card in gpu_state.gpus),
            has_version_mismatch=gpu_state.smi == "mismatch",
        ),
        kernel_parameters=tuple(sections.first("kernel-parameters").split()),
        clock_ahead_s=float(clock) - time.time() if clock else 0.0,
    )


# GPU allocations of a GB10 are not charged to a process or cgroup; only MemAvailable shows them.
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
    available_bytes: int  # without memory kept for a kexec handover
    cma_total_bytes: int
    cma_free_bytes: int  # above cma_total_bytes if memory is kept for a kexec handover
    blocks: machine.FreeBlocks | None  # None if unreadable, because only root may read them
    driver_failures: int  # lines of the kernel log since the boot


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    rss_bytes: int
    cgroup: str
    name: str


def parse_memory(sections: facts.Sections) -> Memory:
    matches = (re.match(r"(\w+):\s+(\d+) kB", line) for line in sections["meminfo"])
    kib = {match[1]: int(match[2]) for match in matches if match}
    total, available, cma_total, cma_free = (
        kib.get(key, 0) * 1024 for key in ("MemTotal", "MemAvailable", "CmaTotal", "CmaFree")
    )
    # The first line is the page size; on a host without /proc/buddyinfo it is the only line.
    page_bytes, *zones = [*sections["buddyinfo"], ""]
    blocks = None
    if page_bytes.isdigit():
        blocks = machine.parse_buddyinfo("\n".join(zones), int(page_bytes))
    failures = "".join(sections["driver-memory"])
    return Memory(
        total,
        # A kernel with kexec handover counts its reserve (CmaFree - CmaTotal) as available.
        available - max(0, cma_free - cma_total),
        cma_total,
        cma_free,
        blocks,
        int(failures) if failures.isdigit() else 0,
    )


def parse_processes(lines: Iterable[str]) -> Iterator[Process]:
    for line in lines:
        pid, rss_kib, cgroup, name = [*line.split(maxsplit=3), "", "", "", ""][:4]  # padded
        if pid.isdigit() and rss_kib.isdigit():
            yield Process(int(pid), int(rss_kib) * 1024, cgroup, name)


def audit_script(folder: str = "/var/lib/dpkg") -> str:
    """Return a script that prints half-installed packages, unless an installation is running."""
    return f"""
echo '== dpkg-audit'
busy=
for lock in {folder}/lock-frontend {folder}/lock; do
  inode=$(stat -c %i "$lock" 2>/dev/null) && grep -q ":$inode " /proc/locks && busy=yes
done
[ -n "$busy" ] || dpkg --audit
"""


def parse_audit(lines: Sequence[str]) -> tuple[str, ...]:
    names = (line.split()[0] for line in lines if line.startswith(" ") and line.strip())
    return tuple(dict.fromkeys(names))  # a package may be listed under several faults


_STOPPED = str(Paths(Path("/")).stopped(MAIN_SERVICE).parent)


def stopped_script(folder: str = _STOPPED) -> str:
    """Return a script that prints each stopped service's name and state file, on two lines."""
    return f"""
echo '== stopped'
for file in {folder}/*.json; do
  [ -f "$file" ] && {{ basename "$file" .json; head -c 4096 "$file" | tr -d '\\n'; echo; }}
done
"""


def engine_memory_script(folder: str = RELEASES_DIR) -> str:
    """Return a script that prints each running engine unit and the bytes planned for it."""
    prefix, suffix = SERVE.unit("INSTANCE").split("@INSTANCE")
    return rf"""
echo '== engine-memory'
systemctl list-units --plain --no-legend --state=active,activating '{SERVE.unit("*")}' |
  while read -r unit _; do
    name=${{unit#{prefix}@}}
    echo "$unit $(head -c 1048576 "{folder}/${{name%{suffix}}}/release.json" 2>/dev/null |
      tr -d ' \n' | sed -n 's/.*"memory":{{[^}}]*"needed_bytes":\([0-9]*\).*/\1/p')"
  done
"""


def _tailscale(lines: Sequence[str]) -> str:
    """Return the address, which may follow warnings, or the first line."""
    addresses = (line for line in lines if re.fullmatch(r"[0-9.]{7,15}", line))
    return next(addresses, next(iter(lines), ""))


_OTHER_SCRIPT = rf"""
echo '== stubs'
dpkg-query -W -f '${{db:Status-Abbrev}} ${{Package}} ${{Version}}\n' | grep -F {LAB_STUB_SUFFIX}
echo '== daily'; head -c 65536 {DAILY} 2>/dev/null; echo
echo '== tailscale'; tailscale ip -4 2>&1
echo '== unit-files'; {units.list_unit_files_command()}
"""


@dataclass(frozen=True, slots=True)
class Survey:
    user: str  # login name if sudo needs a password; "" otherwise
    identity: HostIdentity
    gpu: gpu.GpuState
    memory: Memory
    processes: tuple[Process, ...]
    disk_usage: tuple[disk.DiskUsage, ...]
    reclaimable: dict[str, int]  # bytes by kind in `docker system df`
    listeners: tuple[network.Listener, ...]
    containers: tuple[docker_facts.Container, ...]
    docker_silent: str  # state of docker's unit if docker does not respond; "" otherwise
    broken_packages: tuple[str, ...]  # listed by dpkg --audit
    serving: tuple[str, ...]  # running engine units
    stub_packages: tuple[str, ...]  # "name version" of stubs
    images: tuple[str, ...]  # images of the plan that are present
    tailscale: str  # the host's tailnet address, or the error text of the command
    stored: disk.StoredFiles  # weights that need no download
    daily: tuple[Problem, ...] = ()  # problems found by the host's daily check
    parents: tuple[disk.ParentDirectory, ...] = ()  # parent directories of the plan's paths
    stopped: Mapping[str, Stopped] = field(default_factory=dict)  # services a user stopped
    engine_bytes: Mapping[str, int] = field(default_factory=dict)  # planned, by running unit
    unit_overrides: tuple[str, ...] = ()  # unmanaged files that change our units
    read_only: tuple[str, ...] = ()  # directories of the plan that root cannot write to

    @property
    def obtainable_bytes(self) -> int | None:
        """Memory available after our engines stop; ``None`` if their size is unknown."""
        if not set(self.serving) <= set(self.engine_bytes):
            return None
        freed_bytes = sum(self.engine_bytes[unit] for unit in self.serving)
        return min(self.memory.total_bytes, self.memory.available_bytes + freed_bytes)

    @property
    def sudo_works(self) -> bool:
        return not self.user

    @property
    def stubbed(self) -> tuple[str, ...]:
        """Stubs that replace real software; results with them say nothing about a real Spark."""
        driver = self.gpu.driver_version
        return (
            *self.stub_packages,
            *([f"driver {driver}"] if driver.endswith(LAB_STUB_SUFFIX) else ()),
        )


class HostSurvey(facts.HostFact[Survey]):
    """Run it without pyinfra's sudo: the script itself uses sudo if possible."""

    def command(
        self,
        paths: Sequence[str],
        ports: Sequence[int],
        images: Sequence[str] = (),
        shared_paths: Sequence[str] = (),
        look_in: Sequence[str] = (),
    ) -> str:
        return facts.as_root(
            facts.build_script(
                IDENTITY_SCRIPT,
                gpu.GPU_SCRIPT,
                MEMORY_SCRIPT,
                disk.stored_script(paths, look_in),
                network.ports_script(ports),
                facts.SERVING_SCRIPT,
                engine_memory_script(),
                audit_script(),
                stopped_script(),
                _OTHER_SCRIPT,
                # Docker takes half of the time.
                parallel=(
                    disk.disk_script(paths, shared_paths),
                    docker_facts.CONTAINERS_SCRIPT,
                    docker_facts.images_script(images),
                ),
            )
        )

    def process(self, output: list[str]) -> Survey:
        sections = facts.parse_sections(output)
        # "yes", "root", or "no" followed by the user.
        access, *users = sections["sudo"] or ["no"]
        runs_as_root = access != "no"
        gpu_state = gpu.parse_gpu(sections)
        daily = facts.parse_document(DailyReport, sections.text("daily"))
        stopped = sections["stopped"]  # two lines for each service: name and document
        engines = (line.partition(" ") for line in sections["engine-memory"])
        unreachable = (line for line in sections["containers"] if line.startswith("unreachable "))
        return Survey(
            user="" if runs_as_root else next(iter(users), "?"),
            identity=parse_identity(sections, gpu_state),
            gpu=gpu_state,
            memory=parse_memory(sections),
            processes=tuple(parse_processes(sections["processes"])),
            disk_usage=tuple(disk.parse_disk_usage(sections["paths"])),
            reclaimable=disk.parse_reclaimable(sections["docker-df"]),
            listeners=network.parse_listeners(sections["listeners"], sections["listener-cgroups"]),
            containers=tuple(docker_facts.parse_containers(sections["containers"])),
            docker_silent=next(unreachable, "").removeprefix("unreachable "),
            broken_packages=parse_audit(sections["dpkg-audit"]),
            serving=tuple(filter(None, sections["serving"])),
            stub_packages=tuple(
                " ".join(line.split()[1:3]) for line in sections["stubs"] if line[:2] == "ii"
            ),
            images=tuple(sections["images"]),
            tailscale=_tailscale(sections["tailscale"]),
            stored=disk.parse_stored(sections["stored"]),
            daily=daily.problems if daily else (),
            parents=tuple(disk.parse_parents(sections["parents"])),
            # An unreadable file also keeps the service down.
            stopped={
                name: facts.parse_document(Stopped, text) or Stopped(None, "an unknown time")
                for name, text in zip(stopped[::2], stopped[1::2], strict=False)
            },
            engine_bytes={unit: int(planned) for unit, _, planned in engines if planned.isdigit()},
            unit_overrides=units.find_unit_overrides(sections["unit-files"]),
            read_only=tuple(sections["read-only"]) if runs_as_root else (),
        )
