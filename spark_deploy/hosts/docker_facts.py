"""Read docker and the containers of a host.

Sources: docker info (20.10 to 29), NVIDIA Container Toolkit 1.19, CDI specification files.
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from spark_contract.machine import DRIVER_MODULE, LIBCUDA, libcuda_version, module_version
from spark_contract.records import GpuProof
from spark_contract.units import DIGEST12, RELEASE_LABEL, SERVICE_LABEL

from spark_deploy.hosts import facts
from spark_deploy.hosts.packages import known_urls_script, packages_script, parse_packages
from spark_deploy.plan.jobs import DAEMON_JSON

# Other fields of `docker info` contain proxies with passwords. CDISpecDirs is last, because a
# client without CDI fails there, after printing the rest.
_INFO = re.findall(
    r"\w+",
    "Runtimes DefaultRuntime LiveRestoreEnabled Debug LoggingDriver DockerRootDir Driver "
    "RegistryConfig ServerVersion",
)
_INFO_FORMAT = (
    "{" + ",".join(f'"{key}":{{{{json .{key}}}}}' for key in _INFO) + "}\n{{json .CDISpecDirs}}"
)
# A busy host may respond late, so no response means unknown, not missing.
_TIMEOUTS_S = (30, 90)
_SCRIPT = rf"""
silent=
query() {{
  name=$1; shift
  timeout $first_timeout_s "$@" && return
  [ $? = 124 ] || return
  timeout $second_timeout_s "$@" && return
  [ $? = 124 ] && silent="$silent$name "
}}
echo '== engine'; command -v dockerd; readlink -f "$(command -v docker)"
[ -e /snap/bin/docker ] && echo /snap/bin/docker
echo '== unit'
systemctl show -p LoadState -p ActiveState -p UnitFileState -p ExecMainStartTimestamp \
  -p StateChangeTimestamp --timestamp=us+utc docker.service
echo '== daemon-json'
[ -e {DAEMON_JSON} ] && {{ stat -c 'mtime=%.Y' {DAEMON_JSON}; cat {DAEMON_JSON}; }}
echo '== info'
command -v docker >/dev/null 2>&1 && query docker docker info --format '{_INFO_FORMAT}'
echo '== toolkit'; query toolkit nvidia-ctk --version
echo '== runtime'; command -v nvidia-container-runtime
echo '== toolkit-mode'
sed -n 's/^ *mode *= *"\([a-z]*\)".*/\1/p' /etc/nvidia-container-runtime/config.toml
echo '== cdi'
for spec in /etc/cdi/*.yaml /etc/cdi/*.json /var/run/cdi/*.yaml /var/run/cdi/*.json; do
  [ -e "$spec" ] && grep -q nvidia.com/gpu "$spec" &&
    echo "$spec $(grep -oE '{LIBCUDA}' "$spec" | sort -u | head -n 1)"
done
echo '== module'; cat {DRIVER_MODULE}
echo '== driver'; query driver nvidia-smi --query-gpu=driver_version --format=csv,noheader
echo '== silent'; echo $silent
echo '== kernel'; uname -r
{facts.SERVING_SCRIPT}
"""


@dataclass(frozen=True, slots=True)
class Docker:
    dockerd: str  # path; "" if docker is not installed
    snap: bool
    # LoadState ActiveState UnitFileState ExecMainStartTimestamp StateChangeTimestamp
    unit: dict[str, str]
    daemon_json: str | None  # content of the file; None if missing
    daemon_json_mtime_s: float
    info: dict[str, Any]  # {} if the daemon does not respond
    toolkit_version: str
    toolkit_mode: str  # "auto" | "legacy" | "cdi" | ""
    runtime: str  # path of NVIDIA's runtime; "" if the toolkit has none
    cdi: dict[str, str]  # path: driver version; "" if the file lists no libcuda
    cdi_directories: tuple[str, ...]  # read by the daemon; empty if it does not support CDI
    driver_version: str
    kernel: str
    serving: tuple[str, ...]
    packages: dict[str, str]
    known_urls: tuple[str, ...]
    receipt: GpuProof | None  # of the last GPU check in a container
    groups: dict[str, tuple[str, ...]]  # groups of each requested user that exists
    silent: tuple[str, ...] = ()  # docker, the toolkit or the driver, if too slow

    @property
    def active(self) -> bool:
        return self.unit.get("ActiveState") == "active" and bool(self.info)

    @property
    def started_at_s(self) -> float:
        return self._time_s("ExecMainStartTimestamp")

    @property
    def loaded_at_s(self) -> float:
        """Time of the last start or reload."""
        return self._time_s("StateChangeTimestamp")

    def _time_s(self, name: str) -> float:
        # Format: Mon 2026-01-05 10:00:00.123456 UTC
        timestamp = self.unit.get(name, "")
        match = re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{6})?", timestamp)
        return datetime.fromisoformat(f"{match[0]}+00:00").timestamp() if match else 0.0


class DockerState(facts.HostFact[Docker]):
    def command(
        self,
        packages: Sequence[str],
        receipt_path: str,
        urls: Sequence[str] = (),
        users: Sequence[str] = (),
    ) -> str:
        return facts.build_script(
            "exec 2>/dev/null",
            f"first_timeout_s={_TIMEOUTS_S[0]} second_timeout_s={_TIMEOUTS_S[1]}",
            _SCRIPT,
            packages_script(packages),
            known_urls_script(urls),
            f"echo '== receipt'; cat {shlex.quote(receipt_path)}",
            "echo; echo '== groups'",
            *(f"id -nG -- {shlex.quote(user)} | sed s/^/{shlex.quote(user)}' '/" for user in users),
        )

    def process(self, output: list[str]) -> Docker:
        sections = facts.parse_sections(output)
        engine, info = sections["engine"], sections["info"]
        mtime, *daemon_json = sections["daemon-json"] or [""]
        docker_info = _parse_json(info[:1], dict)  # without server fields if the daemon is down
        drivers = [line.strip() for line in sections["driver"] if re.match(r"\s*\d", line)]
        toolkit = re.search(r"CLI version (\S+)", sections.text("toolkit"))
        cdi = (line.partition(" ") for line in sections["cdi"])
        return Docker(
            dockerd=next((line for line in engine if line.endswith("/dockerd")), ""),
            snap=any("/snap/" in line or line == "/usr/bin/snap" for line in engine),
            unit=facts.parse_key_values(sections["unit"]),
            daemon_json="\n".join(daemon_json) if mtime else None,
            daemon_json_mtime_s=float(mtime.removeprefix("mtime=") or 0),
            info=docker_info if docker_info.get("ServerVersion") else {},
            toolkit_version=toolkit[1] if toolkit else "",
            toolkit_mode=sections.first("toolkit-mode"),
            runtime=sections.first("runtime"),
            cdi={path: libcuda_version(library) for path, _, library in cdi},
            cdi_directories=tuple(map(str, _parse_json(info[1:], list))),
            driver_version=drivers[0] if drivers else module_version(sections.text("module")),
            kernel=sections.first("kernel"),
            serving=tuple(filter(None, sections["serving"])),
            packages=parse_packages(sections["packages"]),
            known_urls=tuple(sections["known-urls"]),
            receipt=facts.parse_document(GpuProof, sections.text("receipt")),
            silent=tuple(name for line in sections["silent"] for name in line.split()),
            groups={
                user: tuple(names) for user, *names in map(str.split, sections["groups"]) if names
            },
        )


def _parse_json(lines: Iterable[str], kind: type[Any]) -> Any:
    try:
        value = json.loads("\n".join(lines))
    except ValueError:
        return kind()
    return value if isinstance(value, kind) else kind()


# Omit environment and command line, which may contain secrets; one variable is safe.
_FIELDS = {
    "id": ".Id",
    "name": ".Name",
    "image": ".Config.Image",
    "state": ".State.Status",
    "restart": ".HostConfig.RestartPolicy.Name",
    "runtime": ".HostConfig.Runtime",
    "requests": ".HostConfig.DeviceRequests",
    "labels": ".Config.Labels",
    "ports": ".HostConfig.PortBindings",
}
# An unset variable prints nothing; the final null keeps the list valid.
_VISIBLE = (
    '{{range .Config.Env}}{{$parts := split . "="}}'
    '{{if eq (index $parts 0) "NVIDIA_VISIBLE_DEVICES"}}{{json (index $parts 1)}},{{end}}{{end}}'
)
_INSPECT_FORMAT = (
    "{"
    + ",".join(f'"{key}":{{{{json {path}}}}}' for key, path in _FIELDS.items())
    + f',"visible":[{_VISIBLE}null]}}'
)
CONTAINERS_SCRIPT = rf"""
echo '== containers'
if command -v docker >/dev/null 2>&1; then
  ids=$(timeout 20 docker ps -aq --no-trunc) ||
    echo "unreachable $(systemctl show -p ActiveState --value docker.service)"
  [ -n "$ids" ] && timeout 30 docker inspect --format '{_INSPECT_FORMAT}' $ids
fi
"""


def images_script(references: Sequence[str]) -> str:
    names = " ".join(shlex.quote(reference) for reference in references)
    return rf"""
echo '== images'
# If any image is missing, inspect fails; then inspect each image separately.
print_if_present() {{ timeout 20 docker image inspect "$@" >/dev/null 2>&1 && printf '%s\n' "$@"; }}
set -- {names}
command -v docker >/dev/null 2>&1 && [ $# != 0 ] &&
  {{ print_if_present "$@" || for image; do print_if_present "$image"; done; }}
"""


# Repository names of images that serve models.
_ENGINES = re.compile(
    r"vllm|sglang|ollama|llama[._-]?cpp|llama-server|text-generation|tritonserver|trtllm|"
    r"tensorrt|lmdeploy|exllama|tabbyapi|lmstudio|comfyui|nim/|aphrodite|localai"
)
# Containers of releases and jobs; other projects also use the prefix "spark-".
_MANAGED_NAME = re.compile(rf"spark-[a-z0-9-]+-{DIGEST12}")


@dataclass(frozen=True, slots=True)
class Container:
    id: str
    name: str
    image: str
    state: str  # created running paused restarting removing exited dead
    restart: str  # no always unless-stopped on-failure
    uses_gpu: bool
    labels: dict[str, str]
    ports: frozenset[str] = frozenset()  # published on the host

    @property
    def managed(self) -> bool:
        labelled = {RELEASE_LABEL, SERVICE_LABEL} & set(self.labels)
        return bool(labelled) or _MANAGED_NAME.fullmatch(self.name) is not None

    @property
    def is_engine(self) -> bool:
        return self.uses_gpu or bool(_ENGINES.search(self.image.lower()))

    @property
    def alive(self) -> bool:
        return self.state in ("running", "restarting", "paused")

    @property
    def restarts(self) -> bool:
        return self.restart == "always" or (self.restart == "unless-stopped" and self.alive)


def parse_containers(lines: Iterable[str]) -> Iterator[Container]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        yield Container(
            id=row["id"],
            name=row["name"].lstrip("/"),
            image=row["image"],
            state=row["state"],
            restart=row["restart"] or "no",
            uses_gpu=_uses_gpu(row["requests"], row["runtime"], row.get("visible")),
            labels=row["labels"] or {},
            ports=frozenset(
                binding["HostPort"]
                for bindings in (row.get("ports") or {}).values()
                for binding in bindings or ()
            ),
        )


def _uses_gpu(requests: object, runtime: object, visible: Sequence[str | None] | None) -> bool:
    request_json = json.dumps(requests).lower() if isinstance(requests, list) else ""
    first_visible = visible[0] if visible else None
    # NVIDIA's runtime, often the default, adds no GPU without visible devices.
    by_runtime = runtime == "nvidia" and first_visible not in (None, "", "void", "none")
    return by_runtime or '"gpu"' in request_json or "nvidia" in request_json
