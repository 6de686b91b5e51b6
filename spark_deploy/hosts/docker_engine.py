"""daemon.json, and what the docker operations run on a host: start, reload, GPU check."""

from __future__ import annotations

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
from spark_deploy.hosts.docker_facts import CONTAINERS_SCRIPT, Docker, DockerState, parse_containers
from spark_deploy.hosts.facts import build_script, split_sections
from spark_deploy.hosts.gpu import gpu_arguments, gpu_problem
from spark_deploy.hosts.host_errors import Refused, host_command, refuse
from spark_deploy.plan.machine import DockerPlan

# Keys and which of them a SIGHUP reloads: dockerd reference, "Configuration reload behavior".
NVIDIA_RUNTIME = {"path": "nvidia-container-runtime", "args": []}


RELOADABLE = frozenset(
    {
        "debug",
        "labels",
        "live-restore",
        "max-concurrent-downloads",
        "max-concurrent-uploads",
        "max-download-attempts",
        "default-runtime",
        "runtimes",
        "insecure-registries",
        "registry-mirrors",
        "shutdown-timeout",
    }
)


def parse_daemon_json(text: str) -> dict[str, Any]:
    """Read a daemon.json; an empty file counts as `{}`.

    Raises:
        ValueError: not JSON, or not an object.
    """
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
    """Write it as nvidia-ctk and people do: four blanks, keys in their order."""
    return json.dumps(value, indent=4) + "\n"


def unmet_keys(wanted: Mapping[str, Any], info: Mapping[str, Any]) -> tuple[str, ...]:
    """List the keys of ``wanted`` that the running daemon does not run with.

    Args:
        wanted: keys of ours, as merged into the file.
        info: `docker info --format '{{json .}}'` of the daemon.

    Keys `docker info` does not show are not judged here.
    """
    return tuple(key for key, value in wanted.items() if not _runs_with(key, value, info))


def is_visible(key: str) -> bool:
    """Whether `docker info` shows what became of a key."""
    return key in _VISIBLE


def _runs_with(key: str, value: Any, info: Mapping[str, Any]) -> bool:
    return _VISIBLE[key](value, info) if key in _VISIBLE else True


def _insecure(value: Any, info: Mapping[str, Any]) -> bool:
    registry = info.get("RegistryConfig") or {}
    networks = registry.get("InsecureRegistryCIDRs") or []
    indexes = registry.get("IndexConfigs") or {}
    insecure = {name for name, index in indexes.items() if not index.get("Secure", True)}
    return all(name in insecure or name in networks for name in value)


def _mirrors(value: Any, info: Mapping[str, Any]) -> bool:
    mirrors = {
        mirror.rstrip("/") for mirror in (info.get("RegistryConfig") or {}).get("Mirrors") or []
    }
    return all(mirror.rstrip("/") in mirrors for mirror in value)


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


# Its own words; those of systemd about it say nothing new.
_LOG_TAIL = "journalctl -u docker.service -t dockerd -n 8 -o cat --no-pager"


# An installation exits 0 even when the daemon died at its first start, so look at the daemon. One
# that started before its socket dies with "no sockets found via socket activation", restarts into
# its start limit and takes the socket along; only both together, socket first, come up again. Seen
# in one of ten installations over a removed package.
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
    """Enable and start the engine, and see that its daemon answers.

    Preflight could not look at containers while the daemon was down, and docker starts those
    with a restart policy by itself: so they are looked at here.
    """
    _bring_up(host, "systemctl enable --now docker")
    lines = run(host, build_script("exec 2>/dev/null", CONTAINERS_SCRIPT), timeout_s=60)
    found = parse_containers(split_sections(lines)["containers"])
    strangers = competing_containers(found, allowed)
    if strangers:
        fix = "run again: preflight takes it over where takeover: names it, else stop it first"
        raise Refused(
            *(
                Problem(
                    f"container {container.name}",
                    f"came up with docker ({container.image}, restart: {container.restart})",
                    fix,
                )
                for container in strangers
            )
        )
    return True


@host_command
def apply_keys(
    state: State,
    host: Host,
    question: Mapping[str, Any],
    wanted: Mapping[str, Any],
    keys: tuple[str, ...],
) -> bool:
    """Make the engine take up ``keys``: by reload, and by restart where that does not do."""
    if set(keys) <= RELOADABLE:
        try:
            run(host, "systemctl reload docker && sleep 1", timeout_s=60)
        except CommandFailed as failure:
            host.log(f"docker did not reload: {failure.output.strip()}")
        if not unmet_keys(wanted, _read_docker(host, question).info):
            return True
        host.log("a reload was not enough, docker is restarted")
    _bring_up(host, "systemctl restart docker")
    left = unmet_keys(wanted, _read_docker(host, question).info)
    if left:
        refuse(
            "docker",
            f"after a restart the daemon still does not run with {', '.join(left)}",
            "look for the same keys as options of dockerd in `systemctl cat docker`",
        )
    return True


def _read_docker(host: Host, question: Mapping[str, Any]) -> Docker:
    fact = DockerState()
    return fact.process(run(host, fact.command(**question), timeout_s=120))


def _bring_up(host: Host, command: str) -> None:
    try:
        with heartbeat(host, "docker starts"):
            run(host, _BRING_UP % command, timeout_s=240)
    except CommandFailed:
        tail = "\n".join(run(host, f"{_LOG_TAIL}; true", timeout_s=30))
        fix = "mend what it complains about (`journalctl -u docker`), then run again"
        refuse("docker", f"the daemon does not come up\n{tail}", fix)


def check_key(plan: DockerPlan, state: Docker) -> dict[str, str]:
    """Name what the proof with a container depends on; any change asks for a new one.

    What did not answer counts as it was: that nobody could tell is no change.
    """
    key = _versions(plan, state)
    if state.receipt is not None:
        key.update({name: state.receipt.key.get(name, "") for name in state.silent})
    return key


def _versions(plan: DockerPlan, state: Docker) -> dict[str, str]:
    return {
        "image": plan.check_image,
        "docker": str(state.info.get("ServerVersion", "")),
        "toolkit": state.toolkit_version,
        "mode": state.toolkit_mode,
        # Unknown while the daemon is down: it says whether it reads CDI specifications.
        "gpu_through": " ".join(gpu_arguments(state)) if state.info else "",
        "driver": state.driver_version,
        "kernel": state.kernel,
    }


_PULL_S = 6 * 3600  # of a slow line; one that brings nothing ends much sooner


# Not root, as the engine: device files that are closed to others have to show here.
_NOBODY = "65534:65534"


@host_command
def check_gpu(state: State, host: Host, plan: DockerPlan, question: Mapping[str, Any]) -> bool:
    """Run a container that lists the GPUs and keep the proof; only a `GPU` line counts.

    Exit status and first line prove nothing: CUDA images print a banner before, and exit 0
    without any GPU.
    """
    image = shlex.quote(plan.check_image)
    seen = _read_docker(host, question)
    problem = gpu_problem(seen)
    if problem is not None:
        raise Refused(problem)
    through = gpu_arguments(seen)
    _pull(host, plan.check_image)
    try:
        with heartbeat(host, f"container check with {plan.check_image}"):
            lines = run(
                host,
                f"docker run --rm --network none --user {_NOBODY} {' '.join(through)} "
                f"-e NVIDIA_VISIBLE_DEVICES=all "
                f"-e NVIDIA_DRIVER_CAPABILITIES=utility,compute {image} nvidia-smi -L",
                timeout_s=1800,
            )
    except CommandFailed as failure:
        raise Refused(explain_gpu_error(failure.output, plan.check_image)) from failure
    gpus = [line for line in lines if line.startswith("GPU ")]
    if not gpus:
        raise Refused(explain_gpu_error("\n".join(lines), plan.check_image))
    receipt = GpuProof(check_key(plan, seen), through, gpus[0].partition(" (UUID")[0])
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
    """Have the image before a container of it starts, which would wait for a registry for ever.

    A host that is only prepared has no tools of ours yet, or earlier ones that do not know these
    words: there docker pulls by itself, within the limit of the check.
    """
    pulled = f"{tool.line(tool.IMAGE, image)} 2>&1 || [ $? -eq 2 ]"
    try:
        with heartbeat(host, f"image {image}"):
            run(host, tool.when_installed(pulled), timeout_s=_PULL_S)
    except CommandFailed as failure:
        lines = failure.output.strip().splitlines() or ["no output"]
        problem = Problem(f"image {image}", lines[-1], "`journalctl -u docker`; then run again")
        raise Refused(problem_in(lines[-1]) or problem) from failure


# Regular expressions over what docker and nvidia-smi print, each with cause and way out.
_KNOWN = (
    (
        "(unknown or invalid runtime name|Unknown runtime specified)",
        "the nvidia runtime is not registered",
        "run again; if it stays, look at runtimes in /etc/docker/daemon.json",
    ),
    (
        "could not select device driver",
        "docker has no driver for GPUs: the toolkit is missing or was installed after its start",
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
        "the toolkit is forced to CDI, and docker calls its hook",
        'set mode = "auto" in /etc/nvidia-container-runtime/config.toml',
    ),
    (
        "exec format error",
        "the image is of another architecture, or CDI left its entry point empty",
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
    """Turn what docker said into a cause and a way out; texts of docker 20.10 to 29."""
    for words, what, fix in _KNOWN:
        if re.search(words, output):
            return Problem("container check", what, fix)
    tail = "\n".join(output.strip().splitlines()[-8:]) or "no output"
    return Problem(
        "container check",
        f"no line starting with GPU from `nvidia-smi -L` in {image}:\n{tail}",
        "check images.gpu_check and `docker info` on the host",
    )
