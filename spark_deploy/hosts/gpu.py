"""Read the GPU and driver, install the CUDA toolkit, and check the GPU in a container.

Sources: nvidia-smi 580 (query in CSV), /proc/driver/nvidia/version, nvidia-spark-ota-check 1.0.16,
version.json of CUDA toolkits (11 and later), `nvcc --version`.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pyinfra import host
from pyinfra.api import Host, State
from spark_contract import tool
from spark_contract.documents import to_json
from spark_contract.machine import DRIVER_MODULE, module_version
from spark_contract.paths import GPU_RECEIPT
from spark_contract.records import GpuProof
from spark_contract.tool import parse_problem

from spark_deploy.config.errors import Problem
from spark_deploy.hosts import facts
from spark_deploy.hosts.commands import CommandError, heartbeat, run
from spark_deploy.hosts.docker_facts import Docker, DockerState
from spark_deploy.hosts.files import pack_files, unpack_script
from spark_deploy.hosts.operations import Commands, HostError, host_command, host_operation
from spark_deploy.hosts.packages import add_repositories, install_command, known_urls_script
from spark_deploy.plan.types import CudaPlan, DockerPlan, ManagedFile

# Memory is not queried: a GB10 prints ``[N/A]``.
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
_SMI_ERRORS: tuple[tuple[str, SmiStatus], ...] = (
    ("couldn't communicate with the NVIDIA driver", "no-driver"),
    ("Driver/library version mismatch", "mismatch"),
    ("No devices were found", "no-devices"),
)
# The version counts: Ubuntu turns the package of an old branch into one that needs the new branch.
_DRIVER_PACKAGE = re.compile(r"ii\s+nvidia-driver-\d+(?:-open|-server|-server-open)?\s+(\d+)")


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    driver_version: str


@dataclass(frozen=True, slots=True)
class ComputeApp:
    pid: int
    name: str
    cgroup: str = ""  # "" if the process exited meanwhile


@dataclass(frozen=True, slots=True)
class GpuState:
    module_version: str  # of the loaded kernel module; "" if none is loaded
    smi: SmiStatus
    smi_error: str  # output of a failing nvidia-smi
    gpus: tuple[Gpu, ...]
    compute_apps: tuple[ComputeApp, ...]
    torn_score: float | None  # distance from the vendor's package set; None if unknown
    torn_name: str  # name of that set
    driver_branches: tuple[str, ...]  # of installed driver packages: ("580",)

    @property
    def driver_version(self) -> str:
        """Version of the user-space driver; of the module if nvidia-smi fails."""
        return self.gpus[0].driver_version if self.gpus else self.module_version


def parse_gpu(sections: facts.Sections) -> GpuState:
    smi = parse_smi(sections["smi"])
    pids_and_cgroups = (line.split(maxsplit=1) for line in sections["compute-cgroups"])
    cgroup_by_pid = {pid: "".join(cgroup) for pid, *cgroup in pids_and_cgroups}
    apps = (line.partition(",") for line in sections["compute-apps"])
    try:
        score = json.loads(sections.text("torn"))
    except ValueError:
        score = None
    if not isinstance(score, dict) or not isinstance(score.get("torn"), (int, float)):
        score = {}
    packages = (_DRIVER_PACKAGE.match(line) for line in sections["driver-packages"])
    return GpuState(
        module_version=module_version(sections.text("module")),
        smi=smi.status,
        smi_error=smi.error,
        gpus=smi.gpus,
        compute_apps=tuple(
            ComputeApp(int(pid), name.strip(), cgroup_by_pid.get(pid.strip(), ""))
            for pid, _, name in apps
            if pid.strip().isdigit()
        ),
        torn_score=score.get("torn"),
        torn_name=str(score.get("name", "")),
        driver_branches=tuple(sorted({package[1] for package in packages if package})),
    )


class SmiResult(NamedTuple):
    status: SmiStatus
    error: str = ""
    gpus: tuple[Gpu, ...] = ()


def parse_smi(lines: Sequence[str]) -> SmiResult:
    """Parse the output of nvidia-smi; the last line is ``rc=`` and the exit status."""
    if not lines:
        return SmiResult("missing")
    exit_status = lines[-1].removeprefix("rc=") if lines[-1].startswith("rc=") else "0"
    rows = [line for line in lines if not line.startswith("rc=")]
    text = "\n".join(rows).strip()
    for message, status in _SMI_ERRORS:
        if message in text:
            return SmiResult(status, text)
    gpus = tuple(
        Gpu(*(field.strip() for field in row.split(","))) for row in rows if row.count(",") == 1
    )
    if exit_status != "0" or not gpus:
        return SmiResult("error", text or f"exit status {exit_status}")
    return SmiResult("ok", gpus=gpus)


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
    version: str  # "13.0.2", or nvcc's "13.0.88" if there is no version.json


@dataclass(frozen=True, slots=True)
class Cuda:
    toolkits: tuple[Toolkit, ...]
    known_urls: tuple[str, ...]


class CudaState(facts.HostFact[Cuda]):
    def command(self, urls: Sequence[str] = ()) -> str:
        return facts.build_script(_TOOLKITS, known_urls_script(urls))

    def process(self, output: list[str]) -> Cuda:
        sections = facts.parse_sections(output)
        matches = (re.match(r"(\S+)/bin/nvcc (\d+\.\d+\S*)", line) for line in sections["nvcc"])
        compilers = (Toolkit(*match.groups()) for match in matches if match)
        toolkits = (*parse_version_json(sections["version-json"]), *compilers)
        return Cuda(toolkits, tuple(sections["known-urls"]))


def parse_version_json(lines: Iterable[str]) -> list[Toolkit]:
    lines_by_path: dict[str, list[str]] = {}
    path = ""
    for line in lines:
        if line.startswith("# "):
            path = line.removeprefix("# ")
            lines_by_path[path] = []
        elif path:
            lines_by_path[path].append(line)
    toolkits = []
    for path, content in lines_by_path.items():
        with suppress(ValueError, KeyError, TypeError):
            version = str(json.loads("\n".join(content))["cuda"]["version"])
            toolkits.append(Toolkit(path.removesuffix("/version.json"), version))
    return toolkits


def fact_arguments(plan: CudaPlan) -> dict[str, Any]:
    return {"urls": tuple(repository.url for repository in plan.repositories)}


def find_toolkit(toolkits: Sequence[Toolkit], version: str) -> Toolkit | None:
    """Return the newest toolkit with this major version, if it is at least ``version``."""
    required = _major_minor(version)
    same_major = (
        toolkit for toolkit in toolkits if _major_minor(toolkit.version)[0] == required[0]
    )
    newest = max(same_major, key=lambda toolkit: _major_minor(toolkit.version), default=None)
    return newest if newest and _major_minor(newest.version) >= required else None


def _major_minor(version: str) -> tuple[int, int]:
    major, minor = [*version.split("."), "0"][:2]
    return int(major), int(minor or 0)


@host_operation
def add_cuda_repositories(plan: CudaPlan) -> Commands:
    state = facts.read_fact(CudaState, **fact_arguments(plan))
    needed = find_toolkit(state.toolkits, plan.version) is None
    yield from add_repositories(plan.repositories, state.known_urls, needed=needed)


@host_operation
def install_cuda(plan: CudaPlan) -> Commands:
    state = facts.read_fact(CudaState, **fact_arguments(plan))
    toolkit = find_toolkit(state.toolkits, plan.version)
    if toolkit:
        host.noop(f"CUDA {toolkit.version} at {toolkit.path} is installed")
    else:
        yield install_command([plan.package], plan.package_lock_wait_s)


# A container gets the GPU through NVIDIA's runtime (toolkit modes auto and legacy, docker 19.03 and
# newer) or as a CDI device. The check in a container writes the working arguments to its receipt.
RUNTIME = ("--runtime=nvidia",)
# A default nvidia runtime would add the devices a second time.
CDI = ("--runtime=runc", "--device=nvidia.com/gpu=all")
SPECIFICATION = "/etc/cdi/nvidia.yaml"


def gpu_arguments(state: Docker) -> tuple[str, ...]:
    """Return the arguments of ``docker run`` that give a container the GPU.

    CDI is used only if the toolkit is configured for CDI or has no runtime, because CDI reportedly
    caused freezes under load.
    """
    is_set_to_cdi = state.toolkit_mode == "cdi" and state.cdi_directories
    return CDI if lacks_runtime(state) or is_set_to_cdi else RUNTIME


def lacks_runtime(state: Docker) -> bool:
    return bool(state.toolkit_version) and not state.runtime


def lacks_specification(state: Docker) -> bool:
    # In mode cdi the runtime reads the file even if docker itself does not support CDI.
    return not state.cdi and (gpu_arguments(state) == CDI or state.toolkit_mode == "cdi")


def gpu_problem(state: Docker) -> Problem | None:
    if gpu_arguments(state) != CDI or state.cdi_directories or not state.info:
        return None
    return Problem(
        "docker",
        "the toolkit has no nvidia-container-runtime, "
        f"and docker {state.info['ServerVersion']} does not read CDI specifications",
        "install nvidia-container-runtime, or set docker.daemon: {features: {cdi: true}} "
        "(docker 25 and newer)",
    )


def check_key(plan: DockerPlan, state: Docker) -> dict[str, str]:
    """Return the versions that a check is valid for; assume that silent tools are unchanged."""
    key = {
        "image": plan.check_image,
        "docker": str(state.info.get("ServerVersion", "")),
        "toolkit": state.toolkit_version,
        "mode": state.toolkit_mode,
        # Only a running daemon reports whether it supports CDI.
        "gpu_through": " ".join(gpu_arguments(state)) if state.info else "",
        "driver": state.driver_version,
        "kernel": state.kernel,
    }
    old_key = state.receipt.key if state.receipt else key
    return {**key, **{name: old_key.get(name, "") for name in state.silent}}


_PULL_TIMEOUT_S = 6 * 3600
# The engine is not root either: device files that it cannot open must fail this check.
_NOBODY = "65534:65534"


@host_command
def check_gpu(state: State, host: Host, plan: DockerPlan, arguments: Mapping[str, Any]) -> bool:
    """List the GPUs in a container and write the receipt.

    The exit status proves nothing: without a GPU, CUDA images print a banner and exit 0.
    """
    docker = facts.run_fact(host, DockerState, timeout_s=120, **arguments)
    if problem := gpu_problem(docker):
        raise HostError(problem)
    run_arguments = gpu_arguments(docker)
    _pull(host, plan.check_image)
    try:
        with heartbeat(host, f"checking the GPU with {plan.check_image}"):
            lines = run(
                host,
                f"docker run --rm --network none --user {_NOBODY} {' '.join(run_arguments)} "
                "-e NVIDIA_VISIBLE_DEVICES=all -e NVIDIA_DRIVER_CAPABILITIES=utility,compute "
                f"{shlex.quote(plan.check_image)} nvidia-smi -L",
                timeout_s=1800,
            )
    except CommandError as failure:
        raise HostError(explain_gpu_error(failure.output, plan.check_image)) from failure
    gpus = [line for line in lines if line.startswith("GPU ")]
    if not gpus:
        raise HostError(explain_gpu_error("\n".join(lines), plan.check_image))
    receipt = GpuProof(check_key(plan, docker), run_arguments, gpus[0].partition(" (UUID")[0])
    files = [ManagedFile(GPU_RECEIPT, to_json(receipt).encode())]
    run(host, unpack_script(files), stdin=pack_files(files))
    host.log(f"a container lists {receipt.gpu}")
    return True


def _pull(host: Host, image: str) -> None:
    # Without tools or with older tools (exit status 2), `docker run` pulls the image.
    command = f"{tool.command_line(tool.IMAGE, image)} 2>&1 || [ $? -eq 2 ]"
    try:
        with heartbeat(host, f"pulling image {image}"):
            run(host, tool.when_installed(command), timeout_s=_PULL_TIMEOUT_S)
    except CommandError as failure:
        last_line = (failure.output.strip().splitlines() or ["no output"])[-1]
        fix = "check `journalctl -u docker`, then retry"
        problem = Problem(f"image {image}", last_line, fix)
        raise HostError(parse_problem(last_line) or problem) from failure


# Regular expression for the output of docker 20.10 to 29 and nvidia-smi, cause, fix.
_GPU_ERRORS = (
    (
        "(unknown or invalid runtime name|Unknown runtime specified)",
        "the nvidia runtime is not registered",
        "run again; if that does not help, correct `runtimes` in /etc/docker/daemon.json",
    ),
    (
        "could not select device driver",
        "docker has no GPU driver: the toolkit is missing, or was installed after docker started",
        "restart docker, then retry",
    ),
    (
        "unresolvable CDI devices",
        "the toolkit resolves the GPU through CDI and finds no matching specification",
        'run `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`, or set mode = "legacy" in '
        "/etc/nvidia-container-runtime/config.toml",
    ),
    (
        "invoking the NVIDIA Container Runtime Hook directly",
        "the toolkit accepts only CDI, but docker calls the runtime's hook",
        'set mode = "auto" in /etc/nvidia-container-runtime/config.toml',
    ),
    (
        "exec format error",
        "the image is for a different architecture, or CDI has cleared its entry point",
        'check images.gpu_check; if the host has a CDI specification, set mode = "legacy" in '
        "/etc/nvidia-container-runtime/config.toml",
    ),
    (
        "Driver/library version mismatch",
        "the loaded kernel module and the installed library have different versions",
        "reboot the host",
    ),
)


def explain_gpu_error(output: str, image: str) -> Problem:
    for pattern, cause, fix in _GPU_ERRORS:
        if re.search(pattern, output):
            return Problem("container check", cause, fix)
    tail = "\n".join(output.strip().splitlines()[-8:]) or "no output"
    message = f"`nvidia-smi -L` in {image} lists no GPU:\n{tail}"
    fix = "check images.gpu_check and `docker info` on the host"
    return Problem("container check", message, fix)
