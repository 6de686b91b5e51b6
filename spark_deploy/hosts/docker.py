"""Install and configure docker with the NVIDIA runtime.

A deploy compares its keys with the settings that the running daemon reports, not with files.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from pyinfra import host
from pyinfra import state as current_state
from pyinfra.api import FunctionCommand, Host, State, StringCommand
from spark_contract.paths import GPU_RECEIPT, backup_path

from spark_deploy.config.errors import Problem
from spark_deploy.hosts import gpu
from spark_deploy.hosts.capacity import competing_containers
from spark_deploy.hosts.commands import CommandError, heartbeat, log, log_once, run
from spark_deploy.hosts.docker_facts import CONTAINERS_SCRIPT, Docker, DockerState, parse_containers
from spark_deploy.hosts.facts import build_script, read_fact, run_fact, split_sections
from spark_deploy.hosts.files import write_command
from spark_deploy.hosts.operations import Commands, HostError, fail, host_command, host_operation
from spark_deploy.hosts.packages import add_repositories, install_command
from spark_deploy.plan.jobs import DAEMON_JSON
from spark_deploy.plan.types import DockerPlan, ManagedFile

NVIDIA_RUNTIME = {"path": "nvidia-container-runtime", "args": []}
# dockerd reference, "Configuration reload behavior".
RELOADABLE = frozenset(
    re.findall(
        r"[a-z-]+",
        "debug labels live-restore max-concurrent-downloads max-concurrent-uploads "
        "max-download-attempts default-runtime runtimes insecure-registries registry-mirrors "
        "shutdown-timeout",
    )
)


def parse_daemon_json(text: str) -> dict[str, Any]:
    value = json.loads(text) if text.strip() else {}
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def merge(present: Mapping[str, Any], planned: Mapping[str, Any]) -> dict[str, Any]:
    """Merge objects recursively, append missing list items, replace everything else."""
    result = dict(present)
    for key, value in planned.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            result[key] = merge(old, value)
        elif isinstance(old, list) and isinstance(value, (list, tuple)):
            result[key] = [*old, *(item for item in value if item not in old)]
        else:
            result[key] = value
    return result


def merge_with_runtime(present: Mapping[str, Any], planned: Mapping[str, Any]) -> dict[str, Any]:
    result = merge(present, planned)
    runtimes = result.get("runtimes")
    nvidia = runtimes.get("nvidia") if isinstance(runtimes, dict) else None
    if isinstance(nvidia, dict) and (nvidia.get("path") or nvidia.get("runtimeType")):
        return result
    return merge(result, {"runtimes": {"nvidia": NVIDIA_RUNTIME}})


def unmet_keys(planned: Mapping[str, Any], info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of ``planned`` that have a different value in `docker info`."""
    return tuple(
        key
        for key, value in planned.items()
        if key in _IN_EFFECT and not _IN_EFFECT[key](value, info)
    )


def _are_insecure(value: Any, info: Mapping[str, Any]) -> bool:
    registry = info.get("RegistryConfig") or {}
    networks = registry.get("InsecureRegistryCIDRs") or []
    indexes = registry.get("IndexConfigs") or {}
    insecure = {name for name, index in indexes.items() if not index.get("Secure", True)}
    return all(name in insecure or name in networks for name in value)


def _are_mirrors(value: Any, info: Mapping[str, Any]) -> bool:
    mirrors = (info.get("RegistryConfig") or {}).get("Mirrors") or []
    return {mirror.rstrip("/") for mirror in value} <= {mirror.rstrip("/") for mirror in mirrors}


_IN_EFFECT = {
    "runtimes": lambda value, info: set(value) <= set(info.get("Runtimes") or {}),
    "default-runtime": lambda value, info: info.get("DefaultRuntime") == value,
    "live-restore": lambda value, info: info.get("LiveRestoreEnabled") == value,
    "debug": lambda value, info: info.get("Debug") == value,
    "log-driver": lambda value, info: info.get("LoggingDriver") == value,
    "data-root": lambda value, info: info.get("DockerRootDir") == value,
    "storage-driver": lambda value, info: info.get("Driver") == value,
    "insecure-registries": _are_insecure,
    "registry-mirrors": _are_mirrors,
}


_LOG_TAIL = "journalctl -u docker.service -t dockerd -n 8 -o cat --no-pager"

# apt exits 0 even if the daemon died at its first start. In 10 % of reinstallations it starts
# before its socket and fails ("no sockets found via socket activation") until systemd's start
# limit. The socket fails as well; then both must be started again, the socket first.
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
    """Start docker; fail if this starts other engines, which preflight could not see."""
    _bring_up(host, "systemctl enable --now docker")
    lines = run(host, build_script("exec 2>/dev/null", CONTAINERS_SCRIPT), timeout_s=60)
    containers = tuple(parse_containers(split_sections(lines)["containers"]))
    fix = "stop this container or list it in takeover, then retry"
    problems = []
    for container in competing_containers(containers, allowed):
        restart = f"restart policy {container.restart}"
        message = f"another engine is running in docker ({container.image}, {restart})"
        problems.append(Problem(f"container {container.name}", message, fix))
    if problems:
        raise HostError(*problems)
    return True


@host_command
def apply_keys(
    state: State,
    host: Host,
    arguments: Mapping[str, Any],
    planned: Mapping[str, Any],
    keys: tuple[str, ...],
) -> bool:
    """Reload the daemon, or restart it if a reload does not apply the keys."""
    if set(keys) <= RELOADABLE:
        try:
            run(host, "systemctl reload docker && sleep 1", timeout_s=60)
        except CommandError as failure:
            host.log(f"docker did not reload: {failure.output.strip()}")
        docker = run_fact(host, DockerState, timeout_s=120, **arguments)
        if not unmet_keys(planned, docker.info):
            return True
        host.log("the reload did not apply all keys; restarting docker")
    _bring_up(host, "systemctl restart docker")
    docker = run_fact(host, DockerState, timeout_s=120, **arguments)
    if unmet := unmet_keys(planned, docker.info):
        message = f"after a restart, the daemon still does not use {', '.join(unmet)}"
        fix = "remove these keys from dockerd's command line (`systemctl cat docker`)"
        fail("docker", message, fix)
    return True


def _bring_up(host: Host, command: str) -> None:
    try:
        with heartbeat(host, "starting docker"):
            run(host, _BRING_UP % command, timeout_s=240)
    except CommandError:
        tail = "\n".join(run(host, f"{_LOG_TAIL}; true", timeout_s=30))
        fix = "fix the reported cause (`journalctl -u docker`), then retry"
        fail("docker", f"could not start the daemon\n{tail}", fix)


GROUP = "docker"  # members can become root on the host


def fact_arguments(plan: DockerPlan) -> dict[str, Any]:
    return {
        "packages": (*plan.packages, *plan.toolkit_packages),
        "receipt_path": GPU_RECEIPT,
        "urls": tuple(repository.url for repository in plan.repositories),
        "users": plan.users,
    }


def read_state(plan: DockerPlan) -> Docker:
    return read_fact(DockerState, **fact_arguments(plan))


def missing_packages(plan: DockerPlan, state: Docker) -> tuple[str, ...]:
    engine = () if state.dockerd else plan.packages
    toolkit = () if state.toolkit_version else plan.toolkit_packages
    return tuple(name for name in (*engine, *toolkit) if name not in state.packages)


def planned_keys(plan: DockerPlan, state: Docker) -> dict[str, Any]:
    """Return our keys of daemon.json, with all runtimes of the merged file."""
    merged = planned_file(plan, state, parse_daemon_json(state.daemon_json or ""))
    runtimes = {"runtimes": merged["runtimes"]} if "runtimes" in merged else {}
    return {**plan.daemon, **runtimes}


def planned_file(plan: DockerPlan, state: Docker, present: Mapping[str, Any]) -> dict[str, Any]:
    if gpu.lacks_runtime(state):
        return merge(present, plan.daemon)
    return merge_with_runtime(present, plan.daemon)


@host_operation
def add_docker_repositories(plan: DockerPlan) -> Commands:
    state = read_state(plan)
    needed = bool(missing_packages(plan, state))
    yield from add_repositories(plan.repositories, state.known_urls, needed=needed)


@host_operation
def install_engine(plan: DockerPlan) -> Commands:
    state = read_state(plan)
    if state.snap:
        message = "docker is installed as a snap, which cannot load the NVIDIA libraries"
        fail("docker", message, "run `snap remove docker`, then retry")
    if names := missing_packages(plan, state):
        yield install_command(names, plan.package_lock_wait_s)
        return
    version = state.info.get("ServerVersion", "installed")
    host.noop(f"docker {version} and toolkit {state.toolkit_version} are installed")


@host_operation
def merge_daemon_json(plan: DockerPlan) -> Commands:
    state = read_state(plan)
    text = state.daemon_json
    try:
        present = parse_daemon_json(text or "")
    except ValueError as error:
        fix = "correct the file, then retry"
        fail(DAEMON_JSON, f"the file is not a JSON object ({error}) and was not changed", fix)
    planned = planned_file(plan, state, present)
    if text is not None and planned == present:
        host.noop("daemon.json has our keys")
        return
    # Back up the owner's file only once.
    backup = shlex.quote(backup_path(DAEMON_JSON))
    yield f"[ ! -e {DAEMON_JSON} ] || cp -np {DAEMON_JSON} {backup}"
    yield write_command([ManagedFile(DAEMON_JSON, f"{json.dumps(planned, indent=4)}\n".encode())])


@host_operation
def run_engine(plan: DockerPlan) -> Commands:
    """Make docker use our keys: reload it if that is enough, otherwise restart it.

    `docker info` shows the keys in use: an interrupted run may have written daemon.json without
    applying it, and an edited daemon.json may contain the same keys.
    """
    state = read_state(plan)
    if "docker" in state.silent:
        fix = "check `systemctl status docker` and the host's load, then retry"
        fail("docker", "the daemon accepts requests but does not respond", fix)
    if not state.active:
        yield FunctionCommand(start_engine, [plan.allow_containers], {})
        return
    planned = planned_keys(plan, state)
    keys = keys_not_in_effect(planned, state)
    if not keys:
        host.noop("docker is running with our settings")
        return
    can_reload = set(keys) <= RELOADABLE
    action = "reloading docker's configuration" if can_reload else "restarting docker"
    log(f"{action} to apply {', '.join(keys)}")
    if state.serving and not can_reload:
        log(f"this also restarts {', '.join(state.serving)}")
    yield FunctionCommand(apply_keys, [fact_arguments(plan), planned, keys], {})


def keys_not_in_effect(planned: Mapping[str, Any], state: Docker) -> tuple[str, ...]:
    """Return our keys that the daemon does not use yet.

    `docker info` does not show some keys. They count as unused if daemon.json must change, or has
    changed since the daemon read it.
    """
    present = parse_daemon_json(state.daemon_json or "")

    def is_unread(key: str) -> bool:
        read_at_s = state.loaded_at_s if key in RELOADABLE else state.started_at_s
        return state.daemon_json_mtime_s > read_at_s

    not_shown = (
        key
        for key, value in planned.items()
        if key not in _IN_EFFECT and (is_unread(key) or merge(present, {key: value}) != present)
    )
    return (*unmet_keys(planned, state.info), *not_shown)


@host_operation
def add_users(plan: DockerPlan) -> Commands:
    groups = read_state(plan).groups
    missing = [user for user in plan.users if user in groups and GROUP not in groups[user]]
    unknown = [user for user in plan.users if user not in groups]
    if unknown:
        message = f"no such user on this host: {', '.join(unknown)}"
        fail("docker.users", message, "create the user, or remove the name from docker.users")
    if not missing:
        host.noop(f"users already in group {GROUP}: {', '.join(plan.users) or 'none requested'}")
        return
    for user in missing:
        yield StringCommand("usermod", "-aG", GROUP, "--", shlex.quote(user))
    log(
        f"{', '.join(missing)} can use docker without sudo after the next login; "
        "in an open session, run `newgrp docker`; "
        "if SSH reuses a connection (ControlMaster), "
        "run `ssh -O exit HOST` before you log in again"
    )


@host_operation
def generate_cdi(plan: DockerPlan) -> Commands:
    """Generate a CDI specification for the loaded driver, if the host uses CDI.

    Docker 29 uses the specification for `--gpus`. If it is for an older driver, it lists libraries
    that no longer exist.
    """
    state = read_state(plan)
    loaded = state.driver_version
    outdated = {
        path: version
        for path, version in state.cdi.items()
        if path.startswith("/etc/cdi/") and loaded and version not in ("", loaded)
    }
    if gpu.lacks_specification(state):
        log(f"generating {gpu.SPECIFICATION}, because containers get the GPU through CDI")
        yield f"nvidia-ctk cdi generate --output={gpu.SPECIFICATION}"
        return
    if not outdated:
        host.noop("CDI matches the driver" if state.cdi else "CDI is not used")
    for path, version in outdated.items():
        log(f"{path} is for driver {version}, but driver {loaded} is loaded")
        yield f"nvidia-ctk cdi generate --output={shlex.quote(path)}"


@host_operation
def check_gpu_container(plan: DockerPlan) -> Commands:
    """List the GPUs in a container, unless this already succeeded with the same versions."""
    state = read_state(plan)
    key = gpu.check_key(plan, state)
    receipt = state.receipt
    old_key = receipt.key if receipt else {}
    if receipt and not current_state.is_executing:
        # Docker may not be running yet, so assume that unknown versions are unchanged.
        key = {name: value or old_key.get(name, "") for name, value in key.items()}
    if state.silent:
        names = ", ".join(state.silent)
        log_once(f"{names} did not respond in time; assuming unchanged versions", "yellow")
    # Engines start with these arguments, so changed arguments need a new check, like a new version.
    arguments = tuple(key["gpu_through"].split())
    if receipt and (old_key, receipt.docker_arguments) == (key, arguments):
        host.noop(f"a container has already detected {receipt.gpu} with these versions")
        return
    changes = [
        f"{name} {old_key.get(name)} -> {value}"
        for name, value in key.items()
        if old_key.get(name) != value
    ]
    if receipt and changes:
        log(f"changed since the last check: {', '.join(changes)}")
    yield FunctionCommand(gpu.check_gpu, [plan, fact_arguments(plan)], {})
