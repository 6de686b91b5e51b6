"""daemon.json, and the commands that docker operations run on a host: start, reload, check the GPU.

Keys and which of them a SIGHUP reloads: dockerd reference, "Configuration reload behavior".
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from pyinfra.api.host import Host
from pyinfra.api.state import State
from spark_contract import tool
from spark_contract.documents import text_of
from spark_contract.errors import problem_in
from spark_contract.records import GpuProof

from spark_deploy.config.errors import Problem
from spark_deploy.hosts.capacity import competing_containers
from spark_deploy.hosts.commands import CommandFailed, heartbeat, run
from spark_deploy.hosts.docker_facts import (
    CONTAINERS_SCRIPT,
    Docker,
    DockerState,
    parse_containers,
)
from spark_deploy.hosts.facts import build_script, split_sections
from spark_deploy.hosts.gpu import gpu_arguments, gpu_problem
from spark_deploy.hosts.host_errors import Refused, host_command, refuse
from spark_deploy.plan.types import DockerPlan

NVIDIA_RUNTIME = {"path": "nvidia-container-runtime", "args": []}
RELOADABLE = frozenset(
    re.findall(
        r"[a-z-]+",
        "debug labels live-restore max-concurrent-downloads max-concurrent-uploads "
        "max-download-attempts default-runtime runtimes insecure-registries registry-mirrors "
        "shutdown-timeout",
    )
)


def parse_daemon_json(text: str) -> dict[str, Any]:
    """Read a daemon.json; an empty file is `{}`. Raises ValueError if it is no JSON object."""
    value = json.loads(text) if text.strip() else {}
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def merge(present: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``present`` with ``wanted`` in it: objects merge, lists unite, values replace."""
    result = dict(present)
    for key, value in wanted.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            result[key] = merge(old, value)
        elif isinstance(old, list) and isinstance(value, (list, tuple)):
            result[key] = [*old, *(item for item in value if item not in old)]
        else:
            result[key] = value
    return result


def merge_with_runtime(present: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``wanted`` and register the NVIDIA runtime unless some path is registered already."""
    result = merge(present, wanted)
    runtimes = result.get("runtimes")
    nvidia = runtimes.get("nvidia") if isinstance(runtimes, dict) else None
    if not (isinstance(nvidia, dict) and (nvidia.get("path") or nvidia.get("runtimeType"))):
        result = merge(result, {"runtimes": {"nvidia": NVIDIA_RUNTIME}})
    return result


def render_daemon_json(value: Mapping[str, Any]) -> str:
    """Format it as nvidia-ctk does: four blanks, keys in their order."""
    return json.dumps(value, indent=4) + "\n"


def unmet_keys(wanted: Mapping[str, Any], info: Mapping[str, Any]) -> tuple[str, ...]:
    """List the keys of ``wanted`` that ``info`` (`docker info`) shows with another value."""
    return tuple(k for k, value in wanted.items() if k in _VISIBLE and not _VISIBLE[k](value, info))


def is_visible(key: str) -> bool:
    return key in _VISIBLE


def _insecure(value: Any, info: Mapping[str, Any]) -> bool:
    registry = info.get("RegistryConfig") or {}
    networks = registry.get("InsecureRegistryCIDRs") or []
    indexes = registry.get("IndexConfigs") or {}
    insecure = {name for name, index in indexes.items() if not index.get("Secure", True)}
    return all(name in insecure or name in networks for name in value)


def _mirrors(value: Any, info: Mapping[str, Any]) -> bool:
    mirrors = (info.get("RegistryConfig") or {}).get("Mirrors") or []
    return {mirror.rstrip("/") for mirror in value} <= {mirror.rstrip("/") for mirror in mirrors}


_VISIBLE = {
    "runtimes": lambda value, info: set(value) <= set(info.get("Runtimes") or {}),
    "default-runtime": lambda value, info: info.get("DefaultRuntime") == value,
    "live-restore": lambda value, info: info.get("LiveRestoreEnabled") == value,
    "debug": lambda value, info: info.get("Debug") == value,
    "log-driver": lambda value, info: info.get("LoggingDriver") == value,
    "data-root": lambda value, info: info.get("DockerRootDir") == value,
    "storage-driver": lambda value, info: info.get("Driver") == value,
    "insecure-registries": _insecure,
    "registry-mirrors": _mirrors,
}

_LOG_TAIL = "journalctl -u docker.service -t dockerd -n 8 -o cat --no-pager"

# An installation exits 0 even when the daemon died at the first start, so look at the daemon. If it
# starts before the socket, it dies with "no sockets found via socket activation", restarts into
# the start limit and takes the socket along; only both together, socket first, start again. Seen
# in 10 % of installations over a removed package.
_BRING_UP = """\
up() {
  for i in $(seq 60); do
    systemctl is-active -q docker && docker info >/dev/null 2>&1 && return 0
    systemctl is-failed -q docker && return 1
    sleep 1
  done
  return 1
}
systemctl reset-failed docker
%s
up && exit 0
systemctl cat docker.socket >/dev/null 2>&1 || exit 1
systemctl stop docker.service docker.socket
systemctl reset-failed docker.service docker.socket
systemctl start docker.socket && systemctl start docker.service && up"""


@host_command
def start_engine(state: State, host: Host, allowed: Sequence[str]) -> bool:
    """Enable and start the engine, and check that the daemon answers.

    Preflight could not list containers while the daemon was down, and docker starts those with a
    restart policy by itself: so they are checked here.
    """
    _bring_up(host, "systemctl enable --now docker")
    lines = run(host, build_script("exec 2>/dev/null", CONTAINERS_SCRIPT), timeout_s=60)
    containers = tuple(parse_containers(split_sections(lines)["containers"]))
    fix = "run again: preflight stops containers named in takeover:; stop all further ones first"
    problems = [
        Problem(
            f"container {container.name}",
            f"started with docker ({container.image}, restart: {container.restart})",
            fix,
        )
        for container in competing_containers(containers, allowed)
    ]
    if problems:
        raise Refused(*problems)
    return True


@host_command
def apply_keys(
    state: State,
    host: Host,
    arguments: Mapping[str, Any],
    wanted: Mapping[str, Any],
    keys: tuple[str, ...],
) -> bool:
    """Apply ``keys``: by reload, and by restart where that is not enough."""
    if set(keys) <= RELOADABLE:
        try:
            run(host, "systemctl reload docker && sleep 1", timeout_s=60)
        except CommandFailed as failure:
            host.log(f"docker did not reload: {failure.output.strip()}")
        if not unmet_keys(wanted, _read_docker(host, arguments).info):
            return True
        host.log("a reload was not enough, docker is restarted")
    _bring_up(host, "systemctl restart docker")
    if unmet := unmet_keys(wanted, _read_docker(host, arguments).info):
        refuse(
            "docker",
            f"after a restart the daemon still does not run with {', '.join(unmet)}",
            "look for the same keys as options of dockerd in `systemctl cat docker`",
        )
    return True


def _read_docker(host: Host, arguments: Mapping[str, Any]) -> Docker:
    fact = DockerState()
    return fact.process(run(host, fact.command(**arguments), timeout_s=120))


def _bring_up(host: Host, command: str) -> None:
    try:
        with heartbeat(host, "docker starts"):
            run(host, _BRING_UP % command, timeout_s=240)
    except CommandFailed:
        tail = "\n".join(run(host, f"{_LOG_TAIL}; true", timeout_s=30))
        fix = "fix the reported cause (`journalctl -u docker`), then run again"
        refuse("docker", f"the daemon does not start\n{tail}", fix)


def check_key(plan: DockerPlan, state: Docker) -> dict[str, str]:
    """Return the versions that the container check depends on; unknown ones are unchanged."""
    key = {
        "image": plan.check_image,
        "docker": str(state.info.get("ServerVersion", "")),
        "toolkit": state.toolkit_version,
        "mode": state.toolkit_mode,
        # Unknown while the daemon is down: it reports whether it reads CDI specifications.
        "gpu_through": " ".join(gpu_arguments(state)) if state.info else "",
        "driver": state.driver_version,
        "kernel": state.kernel,
    }
    if state.receipt is not None:
        key.update({name: state.receipt.key.get(name, "") for name in state.silent})
    return key


_PULL_S = 6 * 3600  # on a slow line; a stalled pull fails much sooner
# Not root, as the engine: device files that are closed to other users must fail here.
_NOBODY = "65534:65534"


@host_command
def check_gpu(state: State, host: Host, plan: DockerPlan, arguments: Mapping[str, Any]) -> bool:
    """Run a container that lists the GPUs and write the receipt; only a `GPU` line is a proof.

    Exit status and first line are no proof: CUDA images print a banner before, and exit 0
    without any GPU.
    """
    docker = _read_docker(host, arguments)
    if problem := gpu_problem(docker):
        raise Refused(problem)
    through = gpu_arguments(docker)
    _pull(host, plan.check_image)
    try:
        with heartbeat(host, f"container check with {plan.check_image}"):
            lines = run(
                host,
                f"docker run --rm --network none --user {_NOBODY} {' '.join(through)} "
                "-e NVIDIA_VISIBLE_DEVICES=all -e NVIDIA_DRIVER_CAPABILITIES=utility,compute "
                f"{shlex.quote(plan.check_image)} nvidia-smi -L",
                timeout_s=1800,
            )
    except CommandFailed as failure:
        raise Refused(explain_gpu_error(failure.output, plan.check_image)) from failure
    gpus = [line for line in lines if line.startswith("GPU ")]
    if not gpus:
        raise Refused(explain_gpu_error("\n".join(lines), plan.check_image))
    receipt = GpuProof(check_key(plan, docker), through, gpus[0].partition(" (UUID")[0])
    path = shlex.quote(plan.receipt_path)
    run(
        host,
        f"install -d $(dirname {path}) && cat > {path}.new && chmod 644 {path}.new "
        f"&& mv -fT {path}.new {path}",
        stdin=text_of(receipt),
    )
    host.log(f"a container sees {receipt.gpu}")
    return True


def _pull(host: Host, image: str) -> None:
    """Pull the image before the container starts, which would wait for a registry for ever.

    A host that is only prepared has no tools yet, or older tools without this verb: there docker
    pulls by itself, within the limit of the check.
    """
    command = f"{tool.line(tool.IMAGE, image)} 2>&1 || [ $? -eq 2 ]"
    try:
        with heartbeat(host, f"image {image}"):
            run(host, tool.when_installed(command), timeout_s=_PULL_S)
    except CommandFailed as failure:
        last = (failure.output.strip().splitlines() or ["no output"])[-1]
        problem = Problem(f"image {image}", last, "`journalctl -u docker`; then run again")
        raise Refused(problem_in(last) or problem) from failure


# Output of docker 20.10 to 29 and nvidia-smi (regular expression), cause, fix.
_GPU_ERRORS = (
    (
        "(unknown or invalid runtime name|Unknown runtime specified)",
        "the nvidia runtime is not registered",
        "run again; if it stays, look at runtimes in /etc/docker/daemon.json",
    ),
    (
        "could not select device driver",
        "docker has no driver for GPUs: the toolkit is missing or newer than docker's start",
        "restart docker",
    ),
    (
        "unresolvable CDI devices",
        "the toolkit resolves the GPU through CDI and finds no matching specification",
        '`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`, or mode = "legacy" in '
        "/etc/nvidia-container-runtime/config.toml",
    ),
    (
        "invoking the NVIDIA Container Runtime Hook directly",
        "the toolkit is forced to CDI, and docker calls the runtime's hook",
        'set mode = "auto" in /etc/nvidia-container-runtime/config.toml',
    ),
    (
        "exec format error",
        "the image is of another architecture, or CDI left the entry point empty",
        'check images.gpu_check; with a CDI specification present set mode = "legacy" in '
        "/etc/nvidia-container-runtime/config.toml",
    ),
    (
        "Driver/library version mismatch",
        "the running module and the installed library differ",
        "reboot",
    ),
)


def explain_gpu_error(output: str, image: str) -> Problem:
    for pattern, cause, fix in _GPU_ERRORS:
        if re.search(pattern, output):
            return Problem("container check", cause, fix)
    tail = "\n".join(output.strip().splitlines()[-8:]) or "no output"
    return Problem(
        "container check",
        f"no line starting with GPU from `nvidia-smi -L` in {image}:\n{tail}",
        "check images.gpu_check and `docker info` on the host",
    )
