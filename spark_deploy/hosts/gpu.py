"""GPU and driver as the host reports them; the CUDA toolkit, kept or installed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pyinfra.api.operation import operation
from pyinfra.context import host
from spark_contract.machine import DRIVER_MODULE, module_version

from spark_deploy.config.errors import Problem
from spark_deploy.hosts.docker_facts import Docker
from spark_deploy.hosts.facts import (
    HostFact,
    Sections,
    build_script,
    container_id,
    parse_sections,
    read_fact,
)
from spark_deploy.hosts.host_errors import Commands, host_errors
from spark_deploy.hosts.packages import (
    Repositories,
    add_repositories,
    install,
    parse_repositories,
    repositories_script,
    repository_files,
)
from spark_deploy.plan.machine import CudaPlan

# Sources: nvidia-smi 580 (query in CSV), /proc/driver/nvidia/version, nvidia-spark-ota-check
# 1.0.16. On GB10 memory figures read ``[N/A]``; that is normal, so they are not asked for.
GPU_SCRIPT = (
    f"echo '== module'; cat {DRIVER_MODULE}\n"
    + r"""apps=
echo '== smi'
if command -v nvidia-smi >/dev/null 2>&1; then
  timeout 30 nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1
  echo "rc=$?"
  echo '== compute-apps'
  apps=$(timeout 30 nvidia-smi --query-compute-apps=pid,process_name --format=csv,noheader)
  echo "$apps"
fi
echo '== compute-cgroups'
for pid in $(echo "$apps" | sed -n 's/^ *\([0-9][0-9]*\),.*/\1/p'); do
  echo "$pid $(awk -F: 'length($3) > length(p) {p = $3} END {print p}' "/proc/$pid/cgroup")"
done
echo '== torn'
if command -v nvidia-spark-ota-check >/dev/null 2>&1; then
  timeout 60 nvidia-spark-ota-check torn-score 2>/dev/null
fi
echo '== driver-packages'
dpkg-query -W -f '${db:Status-Abbrev} ${Package} ${Version}\n' 'nvidia-driver-*' 'cuda-drivers*' \
  'nvidia-fabricmanager-*' 'nvidia-system-station*' 2>/dev/null
"""
)


SmiStatus = Literal["ok", "missing", "no-driver", "mismatch", "no-devices", "error"]


_BROKEN: tuple[tuple[str, SmiStatus], ...] = (
    ("couldn't communicate with the NVIDIA driver", "no-driver"),
    ("Driver/library version mismatch", "mismatch"),
    ("No devices were found", "no-devices"),
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi names it."""

    name: str
    driver_version: str


@dataclass(frozen=True, slots=True)
class ComputeApp:
    """A process that holds a CUDA context."""

    pid: int
    name: str
    cgroup: str = ""  # "" where it could not be told: the process had ended meanwhile

    @property
    def container_id(self) -> str:
        """Full id of the container it runs in, or ""."""
        return container_id(self.cgroup)


@dataclass(frozen=True, slots=True)
class GpuState:
    """State of driver and GPU."""

    module_version: str  # loaded kernel module; "" when none
    smi: SmiStatus
    smi_says: str  # what nvidia-smi printed when it did not work
    gpus: tuple[Gpu, ...]
    compute_apps: tuple[ComputeApp, ...]
    torn_score: float | None  # how far off the vendor's set; None: tool absent or could not tell
    torn_name: str
    driver_branches: tuple[str, ...]  # of installed driver packages: ("580",)

    @property
    def driver_version(self) -> str:
        """Version of the user-space driver, or of the module when nvidia-smi is dead."""
        return self.gpus[0].driver_version if self.gpus else self.module_version


def parse_gpu(sections: Sections) -> GpuState:
    """Read the sections of ``SCRIPT``."""
    smi, says, gpus = parse_smi(list(sections.get("smi", ())))
    torn_score, torn_name = parse_torn(sections.get("torn", ()))
    return GpuState(
        module_version=module_version("\n".join(sections.get("module", ()))),
        smi=smi,
        smi_says=says,
        gpus=gpus,
        compute_apps=parse_apps(sections),
        torn_score=torn_score,
        torn_name=torn_name,
        driver_branches=parse_driver_branches(sections.get("driver-packages", ())),
    )


def parse_apps(sections: Sections) -> tuple[ComputeApp, ...]:
    """Read which processes use the GPU, and in which containers they run."""
    groups = dict([*line.split(maxsplit=1), ""][:2] for line in sections.get("compute-cgroups", ()))
    apps = (line.partition(",") for line in sections.get("compute-apps", ()))
    return tuple(
        ComputeApp(int(pid), name.strip(), groups.get(pid.strip(), ""))
        for pid, _, name in apps
        if pid.strip().isdigit()
    )


def parse_smi(lines: list[str]) -> tuple[SmiStatus, str, tuple[Gpu, ...]]:
    """Tell a working nvidia-smi from the ways in which it fails."""
    if not lines:
        return "missing", "", ()
    returned = lines.pop().removeprefix("rc=") if lines[-1].startswith("rc=") else "0"
    text = "\n".join(lines).strip()
    for words, status in _BROKEN:
        if words in text:
            return status, text, ()
    gpus = tuple(
        Gpu(*(field.strip() for field in line.split(","))) for line in lines if line.count(",") == 1
    )
    if returned != "0" or not gpus:
        return "error", text or f"exit status {returned}", ()
    return "ok", "", gpus


def parse_torn(lines: Sequence[str]) -> tuple[float | None, str]:
    """Read ``nvidia-spark-ota-check torn-score``: how far the host is off the vendor's set."""
    try:
        answer = json.loads("\n".join(lines))
    except ValueError:
        return None, ""
    if not isinstance(answer, dict) or not isinstance(answer.get("torn"), (int, float)):
        return None, ""
    return answer["torn"], str(answer.get("name", ""))


def parse_driver_branches(lines: Sequence[str]) -> tuple[str, ...]:
    """List the branches of installed ``nvidia-driver-NNN[-open]`` packages."""
    found = set()
    for line in lines:
        match = re.match(r"ii\s+nvidia-driver-(\d+)(?:-open|-server|-server-open)?\s", line)
        if match:
            found.add(match.group(1))
    return tuple(sorted(found))


_TOOLKITS = r"""
echo '== version-json'
for file in /usr/local/cuda*/version.json; do
  [ -e "$file" ] && echo "# $file" && cat "$file" && echo
done
echo '== nvcc'
for nvcc in /usr/local/cuda*/bin/nvcc $(command -v nvcc); do
  [ -x "$nvcc" ] && "$nvcc" --version | sed -n "s|^.*release .*, V|$nvcc |p"
done
"""


@dataclass(frozen=True, slots=True)
class Toolkit:
    """One CUDA toolkit."""

    path: str
    version: str  # "13.0.2", or nvcc's "13.0.88" where there is no version.json


@dataclass(frozen=True, slots=True)
class Cuda:
    """State of the cuda role."""

    toolkits: tuple[Toolkit, ...]
    repositories: Repositories


class CudaState(HostFact[Cuda]):
    """Everything the cuda role compares with its plan, in one command."""

    def command(self, urls: Sequence[str] = (), repository_files: Sequence[str] = ()) -> str:
        return build_script(_TOOLKITS, repositories_script(urls, repository_files))

    def process(self, output: list[str]) -> Cuda:
        found = parse_sections(output)
        return Cuda(
            toolkits=(
                *parse_version_json(found.get("version-json", ())),
                *parse_nvcc(found.get("nvcc", ())),
            ),
            repositories=parse_repositories(found),
        )


def parse_version_json(lines: Iterable[str]) -> tuple[Toolkit, ...]:
    """Read version.json files, each below a line `# path`; a broken file is no toolkit."""
    texts: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("# "):
            texts[line[2:]] = []
        elif texts:
            next(reversed(texts.values())).append(line)
    found = []
    for path, text in texts.items():
        try:
            version = str(json.loads("\n".join(text))["cuda"]["version"])
        except (ValueError, KeyError, TypeError):
            continue
        found.append(Toolkit(path.removesuffix("/version.json"), version))
    return tuple(found)


def parse_nvcc(lines: Iterable[str]) -> tuple[Toolkit, ...]:
    """Read lines of `path version` made from nvcc's release line."""
    found = []
    for line in lines:
        match = re.match(r"(\S+)/bin/nvcc (\d+\.\d+\S*)", line)
        if match:
            found.append(Toolkit(match.group(1), match.group(2)))
    return tuple(found)


def fact_arguments(plan: CudaPlan) -> dict[str, Any]:
    """Build the arguments of the one fact of this role."""
    return {
        "urls": tuple(repository.url for repository in plan.repositories),
        "repository_files": repository_files(plan.repositories),
    }


def read_state(plan: CudaPlan) -> Cuda:
    """Read what the host has; one command for all operations of the role."""
    return read_fact(CudaState, **fact_arguments(plan))


def find_toolkit(toolkits: tuple[Toolkit, ...], version: str) -> Toolkit | None:
    """Pick a toolkit of the planned major version that is not older than planned."""
    wanted = _numbers(version)
    fitting = [t for t in toolkits if _numbers(t.version)[0] == wanted[0]]
    newest = max(fitting, key=lambda toolkit: _numbers(toolkit.version), default=None)
    return newest if newest and _numbers(newest.version) >= wanted else None


def _numbers(version: str) -> tuple[int, int]:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return int(major), int(minor or 0)


@operation()
@host_errors
def add_cuda_repositories(plan: CudaPlan) -> Commands:
    """Have the repositories of ``plan`` where the toolkit has to be installed from them."""
    state = read_state(plan)
    needed = find_toolkit(state.toolkits, plan.version) is None
    yield from add_repositories(plan.repositories, state.repositories, needed=needed)


@operation()
@host_errors
def install_cuda(plan: CudaPlan) -> Commands:
    """Have a CUDA toolkit of the planned version; one that is there is kept as it is."""
    found = find_toolkit(read_state(plan).toolkits, plan.version)
    if found:
        host.noop(f"CUDA {found.version} at {found.path} is kept")
        return
    yield install([plan.package], plan.package_lock_wait_s)


# Good with toolkit modes auto and legacy, and with every docker since 19.03.
RUNTIME = ("--runtime=nvidia",)


# Not through the runtime as well: where nvidia is the default it would add the devices once more.
CDI = ("--runtime=runc", "--device=nvidia.com/gpu=all")


SPECIFICATION = "/etc/cdi/nvidia.yaml"


def gpu_arguments(state: Docker) -> tuple[str, ...]:
    """Return the arguments of ``docker run`` that give a container the GPU.

    CDI only where the host's owner decided for it: the toolkit is forced to it, or there is no
    NVIDIA runtime. Hosts that have both serve through the runtime; freezes under load were seen
    with CDI there.
    """
    forced = state.toolkit_mode == "cdi"
    return CDI if lacks_runtime(state) or (forced and state.cdi_directories) else RUNTIME


def lacks_runtime(state: Docker) -> bool:
    """Whether the toolkit is there without its runtime, so that registering one would be a lie."""
    return bool(state.toolkit_version) and not state.runtime


def lacks_specification(state: Docker) -> bool:
    """Whether containers need a CDI specification that nobody has written yet."""
    # An engine without CDI uses one, too: the runtime resolves it where the toolkit is forced.
    needed = gpu_arguments(state) == CDI or state.toolkit_mode == "cdi"
    return needed and not state.cdi


def gpu_problem(state: Docker) -> Problem | None:
    """Say why no container can get at the GPU here; ``None`` when one can."""
    if gpu_arguments(state) != CDI or state.cdi_directories or not state.info:
        return None
    return Problem(
        "docker",
        f"the toolkit has no nvidia-container-runtime, and docker {state.info['ServerVersion']} "
        "does not read CDI specifications",
        "install nvidia-container-runtime, or set docker.daemon: {features: {cdi: true}} "
        "(docker 25 and newer)",
    )
