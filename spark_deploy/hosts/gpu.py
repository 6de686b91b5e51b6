"""GPU, driver and CUDA toolkit as the host reports them; install the toolkit; GPU in containers.

Sources: nvidia-smi 580 (query in CSV), /proc/driver/nvidia/version, nvidia-spark-ota-check 1.0.16,
version.json of CUDA toolkits (11 and later), `nvcc --version`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
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
    add_repositories,
    install,
    known_urls_script,
)
from spark_deploy.plan.types import CudaPlan

# On GB10 memory figures read ``[N/A]``, so they are not requested.
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
    name: str
    driver_version: str


@dataclass(frozen=True, slots=True)
class ComputeApp:
    pid: int
    name: str
    cgroup: str = ""  # "" if the process exited meanwhile

    @property
    def container_id(self) -> str:
        return container_id(self.cgroup)


@dataclass(frozen=True, slots=True)
class GpuState:
    module_version: str  # loaded kernel module; "" when none
    smi: SmiStatus
    smi_error: str  # output of a failing nvidia-smi
    gpus: tuple[Gpu, ...]
    compute_apps: tuple[ComputeApp, ...]
    torn_score: float | None  # distance from the vendor's package set; None: unknown
    torn_name: str
    driver_branches: tuple[str, ...]  # of installed driver packages: ("580",)

    @property
    def driver_version(self) -> str:
        """Version of the user-space driver, or of the module when nvidia-smi fails."""
        return self.gpus[0].driver_version if self.gpus else self.module_version


def parse_gpu(sections: Sections) -> GpuState:
    smi, error, gpus = parse_smi(sections["smi"])
    torn_score, torn_name = parse_torn(sections["torn"])
    return GpuState(
        module_version=module_version(sections.text("module")),
        smi=smi,
        smi_error=error,
        gpus=gpus,
        compute_apps=tuple(parse_apps(sections)),
        torn_score=torn_score,
        torn_name=torn_name,
        driver_branches=parse_driver_branches(sections["driver-packages"]),
    )


def parse_apps(sections: Sections) -> Iterator[ComputeApp]:
    cgroups = dict([*line.split(maxsplit=1), ""][:2] for line in sections["compute-cgroups"])
    for line in sections["compute-apps"]:
        pid, _, name = line.partition(",")
        if pid.strip().isdigit():
            yield ComputeApp(int(pid), name.strip(), cgroups.get(pid.strip(), ""))


def parse_smi(lines: Sequence[str]) -> tuple[SmiStatus, str, tuple[Gpu, ...]]:
    """Return status, error text and GPUs from nvidia-smi's output and the ``rc=`` line."""
    if not lines:
        return "missing", "", ()
    returned = lines[-1].removeprefix("rc=") if lines[-1].startswith("rc=") else "0"
    lines = [line for line in lines if not line.startswith("rc=")]
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
    try:
        answer = json.loads("\n".join(lines))
    except ValueError:
        return None, ""
    if not isinstance(answer, dict) or not isinstance(answer.get("torn"), (int, float)):
        return None, ""
    return answer["torn"], str(answer.get("name", ""))


def parse_driver_branches(lines: Sequence[str]) -> tuple[str, ...]:
    pattern = re.compile(r"ii\s+nvidia-driver-(\d+)(?:-open|-server|-server-open)?\s")
    return tuple(sorted({match.group(1) for match in map(pattern.match, lines) if match}))


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
    path: str
    version: str  # "13.0.2", or nvcc's "13.0.88" where there is no version.json


@dataclass(frozen=True, slots=True)
class Cuda:
    toolkits: tuple[Toolkit, ...]
    known_urls: tuple[str, ...]


class CudaState(HostFact[Cuda]):
    """Everything the CUDA role compares, read by a single command."""

    def command(self, urls: Sequence[str] = ()) -> str:
        return build_script(_TOOLKITS, known_urls_script(urls))

    def process(self, output: list[str]) -> Cuda:
        sections = parse_sections(output)
        toolkits = (*parse_version_json(sections["version-json"]), *parse_nvcc(sections["nvcc"]))
        return Cuda(toolkits, tuple(sections["known-urls"]))


def parse_version_json(lines: Iterable[str]) -> Iterator[Toolkit]:
    """Read version.json files, each below a line `# path`; broken files are skipped."""
    texts: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("# "):
            texts[line[2:]] = []
        elif texts:
            next(reversed(texts.values())).append(line)
    for path, text in texts.items():
        try:
            version = str(json.loads("\n".join(text))["cuda"]["version"])
        except (ValueError, KeyError, TypeError):
            continue
        yield Toolkit(path.removesuffix("/version.json"), version)


def parse_nvcc(lines: Iterable[str]) -> Iterator[Toolkit]:
    for line in lines:
        if match := re.match(r"(\S+)/bin/nvcc (\d+\.\d+\S*)", line):
            yield Toolkit(*match.groups())


def fact_arguments(plan: CudaPlan) -> dict[str, Any]:
    return {"urls": tuple(repository.url for repository in plan.repositories)}


def find_toolkit(toolkits: Sequence[Toolkit], version: str) -> Toolkit | None:
    """Pick the newest toolkit of the planned major version that is not older than planned."""
    wanted = _numbers(version)
    fitting = [t for t in toolkits if _numbers(t.version)[0] == wanted[0]]
    newest = max(fitting, key=lambda t: _numbers(t.version), default=None)
    return newest if newest and _numbers(newest.version) >= wanted else None


def _numbers(version: str) -> tuple[int, int]:
    major, minor = [*version.split("."), "0"][:2]
    return int(major), int(minor or 0)


@operation()
@host_errors
def add_cuda_repositories(plan: CudaPlan) -> Commands:
    """Add the repositories of ``plan`` if the toolkit has to be installed from them."""
    state = read_fact(CudaState, **fact_arguments(plan))
    needed = find_toolkit(state.toolkits, plan.version) is None
    yield from add_repositories(plan.repositories, state.known_urls, needed=needed)


@operation()
@host_errors
def install_cuda(plan: CudaPlan) -> Commands:
    """Install a CUDA toolkit of the planned version; a fitting toolkit is kept as it is."""
    present = find_toolkit(read_fact(CudaState, **fact_arguments(plan)).toolkits, plan.version)
    if present:
        host.noop(f"CUDA {present.version} at {present.path} is kept")
        return
    yield install([plan.package], plan.package_lock_wait_s)


# How a container gets the GPU on this host: NVIDIA's runtime, or a CDI device. The container check
# verifies the choice and writes it to the receipt, which the engine's start uses.

# Works with toolkit modes auto and legacy, and with every docker since 19.03.
RUNTIME = ("--runtime=nvidia",)
# runc, because a default nvidia runtime would add the devices a second time.
CDI = ("--runtime=runc", "--device=nvidia.com/gpu=all")
SPECIFICATION = "/etc/cdi/nvidia.yaml"


def gpu_arguments(state: Docker) -> tuple[str, ...]:
    """Return the arguments of ``docker run`` that give a container the GPU.

    CDI only where the host's owner chose it: the toolkit is forced to it, or there is no NVIDIA
    runtime. Hosts that have both use the runtime; freezes under load were seen with CDI there.
    """
    forced = state.toolkit_mode == "cdi"
    return CDI if lacks_runtime(state) or (forced and state.cdi_directories) else RUNTIME


def lacks_runtime(state: Docker) -> bool:
    """Whether the toolkit is installed without the runtime, which must then not be registered."""
    return bool(state.toolkit_version) and not state.runtime


def lacks_specification(state: Docker) -> bool:
    """Whether containers need a CDI specification that does not exist yet."""
    # An engine without CDI also uses it: the runtime resolves it where the toolkit is forced.
    needed = gpu_arguments(state) == CDI or state.toolkit_mode == "cdi"
    return needed and not state.cdi


def gpu_problem(state: Docker) -> Problem | None:
    """Return why no container can get the GPU here, or ``None``."""
    if gpu_arguments(state) != CDI or state.cdi_directories or not state.info:
        return None
    return Problem(
        "docker",
        f"the toolkit has no nvidia-container-runtime, and docker {state.info['ServerVersion']} "
        "does not read CDI specifications",
        "install nvidia-container-runtime, or set docker.daemon: {features: {cdi: true}} "
        "(docker 25 and newer)",
    )
