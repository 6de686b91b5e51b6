"""Everything preflight wants to know about a host, in one command that changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spark_contract import documents
from spark_contract.documents import DocumentError
from spark_contract.errors import Problem
from spark_contract.paths import DAILY, RELEASES_DIR, Paths
from spark_contract.records import DailyLook, Stopped
from spark_contract.tool import STAND_IN
from spark_contract.units import MAIN_SERVICE, SERVE

from spark_deploy.hosts.facts import disk, docker, gpu, memory, network, reading, system
from spark_deploy.hosts.facts.disk import Above, Place, Reclaimable, Stored
from spark_deploy.hosts.facts.docker import Container
from spark_deploy.hosts.facts.gpu import GpuState
from spark_deploy.hosts.facts.memory import Memory, Process
from spark_deploy.hosts.facts.network import Listener
from spark_deploy.hosts.facts.reading import HostFact
from spark_deploy.hosts.facts.system import HostIdentity


def audit_script(folder: str = "/var/lib/dpkg") -> str:
    """Return what tells of packages that are half installed, and not of those under way.

    An installation outlives the run that began it; while dpkg's lock is held all that it has
    begun is half installed, and who installs next waits for the lock.
    """
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
    """Return what tells which services were stopped on purpose: names, each with its record."""
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
    """Return what prints each running engine's unit and the bytes that its release plans."""
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
    """What one look at a host found."""

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
        """Whether commands can run as root without a prompt."""
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
        return reading.as_root(
            reading.script(
                system.SCRIPT,
                gpu.SCRIPT,
                memory.SCRIPT,
                disk.stored_script(paths, look_in),
                network.ports_script(ports_wanted),
                reading.SERVING,
                engine_memory_script(),
                audit_script(),
                stopped_script(),
                _DPKG,
                # Half of the time is docker's.
                beside=(
                    disk.disk_script(paths, shared_paths),
                    docker.SCRIPT,
                    docker.images_script(images),
                ),
            )
        )

    def process(self, output: list[str]) -> Survey:
        found = reading.whole(output)
        sudo = found.get("sudo", ["no"])
        state = gpu.parse(found)
        return Survey(
            user=(sudo[1] if len(sudo) > 1 else "?") if sudo[0] == "no" else "",
            identity=system.parse(found, state),
            gpu=state,
            memory=memory.parse_memory(found),
            processes=memory.parse_processes(found.get("processes", ())),
            places=disk.parse_places(found.get("places", ())),
            reclaimable=disk.parse_reclaimable(found),
            listeners=network.parse(found.get("listeners", ()), found.get("listener-cgroups", ())),
            containers=docker.parse(found.get("containers", ())),
            docker_silent=docker.silent(found.get("containers", ())),
            broken_packages=audited(found.get("dpkg-audit", ())),
            serving=tuple(line for line in found.get("serving", ()) if line),
            stub_packages=tuple(
                " ".join(line.split()[1:3]) for line in found.get("stubs", ()) if line[:2] == "ii"
            ),
            images=tuple(found.get("images", ())),
            tailscale=reading.first(found, "tailscale"),
            stored=disk.parse(found),
            daily=_daily(found.get("daily", ())),
            above=disk.parse_above(found.get("above", ())),
            stopped=dict(_stopped(found.get("stopped", ()))),
            engine_bytes=_engine_bytes(found.get("engine-memory", ())),
        )


def _engine_bytes(lines: Sequence[str]) -> dict[str, int]:
    pairs = (line.partition(" ") for line in lines)
    return {unit: int(planned) for unit, _, planned in pairs if planned.isdigit()}


def _daily(lines: Sequence[str]) -> tuple[Problem, ...]:
    try:
        return documents.parse(DailyLook, "\n".join(lines)).problems
    except DocumentError:  # there was none yet, or it was cut short
        return ()


def _stopped(lines: Sequence[str]) -> Iterator[tuple[str, Stopped]]:
    """Read names of services, each with its record below it; that there is one keeps it down."""
    for name, said in zip(lines[::2], lines[1::2], strict=False):
        try:
            yield name, documents.parse(Stopped, said)
        except DocumentError:
            yield name, Stopped(None, "an unknown time")


def audited(lines: Sequence[str]) -> tuple[str, ...]:
    """Read the package names of ``dpkg --audit``: indented lines, name first."""
    return tuple(line.split()[0] for line in lines if line.startswith(" ") and line.strip())
