"""CUDA toolkits of a host, by their own word and not by package names.

Sources: version.json beside each toolkit (CUDA 11 and later), `nvcc --version`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from spark_contract.machine import DRIVER_MODULE, module_version

from spark_deploy.hosts.facts import reading
from spark_deploy.hosts.facts.memory import container_id
from spark_deploy.hosts.facts.packages import Repositories, parse_repositories, repositories_script
from spark_deploy.hosts.facts.reading import HostFact, Sections

# Sources: nvidia-smi 580 (query in CSV), /proc/driver/nvidia/version, nvidia-spark-ota-check
# 1.0.16. On GB10 memory figures read ``[N/A]``; that is normal, so they are not asked for.


SCRIPT = (
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


def parse(sections: Sections) -> GpuState:
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
        driver_branches=driver_branches(sections.get("driver-packages", ())),
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


def driver_branches(lines: Sequence[str]) -> tuple[str, ...]:
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
        return reading.script(_TOOLKITS, repositories_script(urls, repository_files))

    def process(self, output: list[str]) -> Cuda:
        found = reading.whole(output)
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
