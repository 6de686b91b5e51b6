"""Container engine with the NVIDIA runtime, decided from what runs and not from files."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.context import state as current_state
from spark_contract.paths import kept_aside

from spark_deploy.hosts.commands import log, log_once
from spark_deploy.hosts.docker_engine import (
    RELOADABLE,
    apply_keys,
    check_gpu,
    check_key,
    is_visible,
    merge,
    merge_with_runtime,
    parse_daemon_json,
    render_daemon_json,
    start_engine,
    unmet_keys,
)
from spark_deploy.hosts.docker_facts import DAEMON_JSON, Docker, DockerState
from spark_deploy.hosts.facts import read_fact
from spark_deploy.hosts.files import put_files
from spark_deploy.hosts.gpu import (
    SPECIFICATION,
    lacks_runtime,
    lacks_specification,
)
from spark_deploy.hosts.host_errors import Commands, host_errors, refuse
from spark_deploy.hosts.packages import add_repositories, install, repository_files
from spark_deploy.plan.machine import DockerPlan
from spark_deploy.plan.managed_files import ManagedFile

GROUP = "docker"  # whoever is in it can become root on the host


def fact_arguments(plan: DockerPlan) -> dict[str, Any]:
    """Build the arguments of the one fact of this role."""
    return {
        "packages": (*plan.packages, *plan.toolkit_packages),
        "receipt_path": plan.receipt_path,
        "urls": tuple(repository.url for repository in plan.repositories),
        "repository_files": repository_files(plan.repositories),
        "users": plan.users,
    }


def read_state(plan: DockerPlan) -> Docker:
    """Read what the host has; one command for all operations of the role."""
    return read_fact(DockerState, **fact_arguments(plan))


def missing_packages(plan: DockerPlan, state: Docker) -> tuple[str, ...]:
    """List the packages to install; an engine of another packaging (Docker CE) is kept."""
    names = [] if state.dockerd else [name for name in plan.packages if name not in state.packages]
    toolkit = [] if state.toolkit_version else [*plan.toolkit_packages]
    return (*names, *(name for name in toolkit if name not in state.packages))


def planned_keys(plan: DockerPlan, state: Docker) -> dict[str, Any]:
    """Return the keys of daemon.json we answer for, with the runtime the file will have."""
    full = planned_file(plan, state, parse_daemon_json(state.daemon_json or ""))
    return {**plan.daemon, **({"runtimes": full["runtimes"]} if "runtimes" in full else {})}


def planned_file(plan: DockerPlan, state: Docker, present: Mapping[str, Any]) -> dict[str, Any]:
    """Return daemon.json as it shall be; without a runtime that the host does not have."""
    if lacks_runtime(state):
        return merge(present, plan.daemon)
    return merge_with_runtime(present, plan.daemon)


@operation()
@host_errors
def add_docker_repositories(plan: DockerPlan) -> Commands:
    """Have the repositories of ``plan`` where packages have to be installed from them."""
    state = read_state(plan)
    needed = bool(missing_packages(plan, state))
    yield from add_repositories(plan.repositories, state.repositories, needed=needed)


@operation()
@host_errors
def install_engine(plan: DockerPlan) -> Commands:
    """Have a container engine and the NVIDIA toolkit; what the factory installed is kept."""
    state = read_state(plan)
    if state.snap:
        refuse(
            "docker",
            "docker is the snap package; its confinement keeps the NVIDIA libraries out",
            "remove it (`snap remove docker`), then run again",
        )
    names = missing_packages(plan, state)
    if not names:
        version = state.info.get("ServerVersion", "installed")
        host.noop(f"docker {version} and toolkit {state.toolkit_version} are kept")
        return
    yield install(names, plan.package_lock_wait_s)


@operation()
@host_errors
def merge_daemon_json(plan: DockerPlan) -> Commands:
    """Have our keys in daemon.json, merged; every other key stays as it is."""
    state = read_state(plan)
    text = state.daemon_json
    try:
        present = parse_daemon_json(text or "")
    except ValueError as error:
        refuse(
            DAEMON_JSON,
            f"not a JSON object ({error}); it was left as it is",
            "mend it by hand, then run again",
        )
    wanted = planned_file(plan, state, present)
    if text is not None and wanted == present:
        host.noop("daemon.json has our keys")
        return
    file = ManagedFile(DAEMON_JSON, render_daemon_json(wanted).encode())
    # The first file is somebody's work: kept beside, once.
    keep = shlex.quote(kept_aside(DAEMON_JSON))
    yield f"[ ! -e {DAEMON_JSON} ] || cp -np {DAEMON_JSON} {keep}"
    yield put_files([file])


@operation()
@host_errors
def run_engine(plan: DockerPlan) -> Commands:
    """Have the engine running with our keys; reload where that is enough, else restart.

    Decided from `docker info`, so a run that died between writing and restarting is made good
    by the next one, and a foreign edit of the file restarts nothing.
    """
    state = read_state(plan)
    if "docker" in state.silent:
        refuse(
            "docker",
            "its daemon took the question and did not answer",
            "see `systemctl status docker` and the load of the host, then run again",
        )
    if not state.active:
        yield FunctionCommand(start_engine, [plan.allow_containers], {})
        return
    keys = keys_not_in_effect(planned_keys(plan, state), state)
    if not keys:
        host.noop("the engine runs with our keys")
        return
    if set(keys) <= RELOADABLE:
        log(f"docker reloads its configuration for: {', '.join(keys)}")
    else:
        log(f"docker is restarted for: {', '.join(keys)}")
        if state.serving:
            log(f"this stops {', '.join(state.serving)}, which starts again by itself")
    yield FunctionCommand(
        apply_keys, [fact_arguments(plan), planned_keys(plan, state), tuple(keys)], {}
    )


def keys_not_in_effect(wanted: Mapping[str, Any], state: Docker) -> tuple[str, ...]:
    """List our keys the daemon does not run with.

    What `docker info` does not show counts when the file is newer than the daemon, or is about
    to get the key.
    """
    keys = list(unmet_keys(wanted, state.info))
    present = parse_daemon_json(state.daemon_json or "")
    newer = state.daemon_json_mtime_s > state.started_at_s
    for key, value in wanted.items():
        if is_visible(key):
            continue
        if newer or merge(present, {key: value}) != present:
            keys.append(key)
    return tuple(keys)


@operation()
@host_errors
def add_users(plan: DockerPlan) -> Commands:
    """Let the users of ``plan`` talk to the engine; nobody who may already is turned away.

    Nothing of ours needs it: every command of a run goes through sudo, so no run depends on a
    login that is newer than the membership.
    """
    groups = read_state(plan).groups
    missing = [user for user in plan.users if GROUP not in groups.get(user, (GROUP,))]
    unknown = [user for user in plan.users if user not in groups]
    if unknown:
        refuse(
            "docker.users",
            f"no such user on this host: {', '.join(unknown)}",
            "create the user, or take the name out of docker.users",
        )
    if not missing:
        host.noop(f"in group {GROUP}: {', '.join(plan.users)}" if plan.users else "nobody is named")
        return
    for user in missing:
        yield StringCommand("usermod", "-aG", GROUP, "--", shlex.quote(user))
    log(
        f"{', '.join(missing)}: docker without sudo from the next login on; sessions that are open "
        "keep their old groups (`newgrp docker` in one; `ssh -O exit HOST` for a shared connection)"
    )


@operation()
@host_errors
def generate_cdi(plan: DockerPlan) -> Commands:
    """Have a CDI specification of this driver, where the host uses CDI at all.

    A specification left over from an older driver names libraries that are gone, and docker 29
    resolves `--gpus` through it.
    """
    state = read_state(plan)
    stale = [
        spec
        for spec in state.cdi
        if spec.path.startswith("/etc/cdi/")
        and spec.driver_version
        and state.driver_version
        and spec.driver_version != state.driver_version
    ]
    if lacks_specification(state):
        log(f"containers get the GPU through CDI: {SPECIFICATION} is made")
        yield f"nvidia-ctk cdi generate --output={SPECIFICATION}"
        return
    if not stale:
        host.noop("CDI is not used" if not state.cdi else "CDI belongs to the driver")
        return
    for spec in stale:
        log(f"{spec.path} is of driver {spec.driver_version}, {state.driver_version} is loaded")
        yield f"nvidia-ctk cdi generate --output={shlex.quote(spec.path)}"


@operation()
@host_errors
def check_gpu_container(plan: DockerPlan) -> Commands:
    """Prove that a container sees the GPU; the proof is kept until a version changes."""
    state = read_state(plan)
    key = check_key(plan, state)
    proof = state.receipt
    if proof and not current_state.is_executing:
        # Predicting: what cannot be read now (docker is down) will most likely be as it was.
        key = {name: value or proof.key.get(name, "") for name, value in key.items()}
    if state.silent:
        log_once(f"no answer in time from {', '.join(state.silent)}; taken as unchanged", "yellow")
    # The engine is started with the receipt's words, so they count like a version.
    wanted = tuple(key["gpu_through"].split())
    if proof and (proof.key, proof.docker_arguments) == (key, wanted):
        host.noop(f"a container saw {proof.gpu} with these versions")
        return
    if proof and proof.key != key:
        old = proof.key
        changed = [
            f"{name} {old.get(name)} -> {new}" for name, new in key.items() if old.get(name) != new
        ]
        log(f"changed since the last proof: {', '.join(changed)}")
    yield FunctionCommand(check_gpu, [plan, fact_arguments(plan)], {})
