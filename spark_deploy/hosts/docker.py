"""Container engine with the NVIDIA runtime, decided from the running state and not from files."""

import shlex
from collections.abc import Mapping
from typing import Any

from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.context import state as current_state
from spark_contract.paths import kept_aside

from spark_deploy.hosts import docker_engine
from spark_deploy.hosts.commands import log, log_once
from spark_deploy.hosts.docker_facts import Docker, DockerState
from spark_deploy.hosts.facts import read_fact
from spark_deploy.hosts.files import put_files
from spark_deploy.hosts.gpu import SPECIFICATION, lacks_runtime, lacks_specification
from spark_deploy.hosts.host_errors import Commands, host_errors, refuse
from spark_deploy.hosts.packages import add_repositories, install
from spark_deploy.plan.jobs import DAEMON_JSON
from spark_deploy.plan.types import DockerPlan, ManagedFile

GROUP = "docker"  # members can become root on the host


def fact_arguments(plan: DockerPlan) -> dict[str, Any]:
    return {
        "packages": (*plan.packages, *plan.toolkit_packages),
        "receipt_path": plan.receipt_path,
        "urls": tuple(repository.url for repository in plan.repositories),
        "users": plan.users,
    }


def read_state(plan: DockerPlan) -> Docker:
    return read_fact(DockerState, **fact_arguments(plan))


def missing_packages(plan: DockerPlan, state: Docker) -> tuple[str, ...]:
    """List the packages to install; an engine of another packaging (Docker CE) is kept."""
    wanted = (
        *(() if state.dockerd else plan.packages),
        *(() if state.toolkit_version else plan.toolkit_packages),
    )
    return tuple(name for name in wanted if name not in state.packages)


def planned_keys(plan: DockerPlan, state: Docker) -> dict[str, Any]:
    """Return the managed keys of daemon.json, including the runtimes of the merged file."""
    full = planned_file(plan, state, docker_engine.parse_daemon_json(state.daemon_json or ""))
    return {**plan.daemon, **({"runtimes": full["runtimes"]} if "runtimes" in full else {})}


def planned_file(plan: DockerPlan, state: Docker, present: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged daemon.json, without a runtime that the host does not have."""
    if lacks_runtime(state):
        return docker_engine.merge(present, plan.daemon)
    return docker_engine.merge_with_runtime(present, plan.daemon)


@operation()
@host_errors
def add_docker_repositories(plan: DockerPlan) -> Commands:
    """Add the repositories of ``plan`` if packages have to be installed from them."""
    state = read_state(plan)
    needed = bool(missing_packages(plan, state))
    yield from add_repositories(plan.repositories, state.known_urls, needed=needed)


@operation()
@host_errors
def install_engine(plan: DockerPlan) -> Commands:
    state = read_state(plan)
    if state.snap:
        refuse(
            "docker",
            "docker is the snap package; snap confinement keeps the NVIDIA libraries out",
            "remove it (`snap remove docker`), then run again",
        )
    if names := missing_packages(plan, state):
        yield install(names, plan.package_lock_wait_s)
        return
    version = state.info.get("ServerVersion", "installed")
    host.noop(f"docker {version} and toolkit {state.toolkit_version} are kept")


@operation()
@host_errors
def merge_daemon_json(plan: DockerPlan) -> Commands:
    """Merge our keys into daemon.json; every other key stays as it is."""
    state = read_state(plan)
    text = state.daemon_json
    try:
        present = docker_engine.parse_daemon_json(text or "")
    except ValueError as error:
        fix = "fix it by hand, then run again"
        refuse(DAEMON_JSON, f"not a JSON object ({error}); it was left as it is", fix)
    wanted = planned_file(plan, state, present)
    if text is not None and wanted == present:
        host.noop("daemon.json has our keys")
        return
    file = ManagedFile(DAEMON_JSON, docker_engine.render_daemon_json(wanted).encode())
    # The owner's file is kept aside, once.
    keep = shlex.quote(kept_aside(DAEMON_JSON))
    yield f"[ ! -e {DAEMON_JSON} ] || cp -np {DAEMON_JSON} {keep}"
    yield put_files([file])


@operation()
@host_errors
def run_engine(plan: DockerPlan) -> Commands:
    """Run the engine with our keys; reload where that is enough, or restart.

    Decided from `docker info`: a run that was interrupted between writing and restarting is
    finished by the next run, and an owner's edit of the file causes no restart.
    """
    state = read_state(plan)
    if "docker" in state.silent:
        fix = "see `systemctl status docker` and the load of the host, then run again"
        refuse("docker", "the daemon accepts requests and does not answer", fix)
    if not state.active:
        yield FunctionCommand(docker_engine.start_engine, [plan.allow_containers], {})
        return
    keys = keys_not_in_effect(planned_keys(plan, state), state)
    if not keys:
        host.noop("the engine runs with our keys")
        return
    if set(keys) <= docker_engine.RELOADABLE:
        log(f"docker reloads the configuration for: {', '.join(keys)}")
    else:
        log(f"docker is restarted for: {', '.join(keys)}")
        if state.serving:
            log(f"this stops {', '.join(state.serving)}, which starts again by itself")
    arguments = [fact_arguments(plan), planned_keys(plan, state), keys]
    yield FunctionCommand(docker_engine.apply_keys, arguments, {})


def keys_not_in_effect(wanted: Mapping[str, Any], state: Docker) -> tuple[str, ...]:
    """List our keys the daemon does not run with.

    A key that `docker info` does not show is included if the file is newer than the daemon, or is
    about to get the key.
    """
    present = docker_engine.parse_daemon_json(state.daemon_json or "")
    newer = state.daemon_json_mtime_s > state.started_at_s
    return (
        *docker_engine.unmet_keys(wanted, state.info),
        *(
            key
            for key, value in wanted.items()
            if not docker_engine.is_visible(key)
            and (newer or docker_engine.merge(present, {key: value}) != present)
        ),
    )


@operation()
@host_errors
def add_users(plan: DockerPlan) -> Commands:
    """Add the users of ``plan`` to the docker group; members are never removed.

    Our own commands use sudo, so no run depends on a login newer than the membership.
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
        host.noop(f"in group {GROUP}: {', '.join(plan.users) or 'no user requested'}")
        return
    for user in missing:
        yield StringCommand("usermod", "-aG", GROUP, "--", shlex.quote(user))
    log(
        f"{', '.join(missing)}: docker without sudo from the next login on; open sessions "
        "keep their old groups (`newgrp docker`; `ssh -O exit HOST` for a shared connection)"
    )


@operation()
@host_errors
def generate_cdi(plan: DockerPlan) -> Commands:
    """Generate a CDI specification of this driver, if the host uses CDI.

    A specification of an older driver names libraries that are gone, and docker 29 resolves
    `--gpus` through it.
    """
    state = read_state(plan)
    loaded = state.driver_version
    stale = [
        spec
        for spec in state.cdi
        if spec.path.startswith("/etc/cdi/") and loaded and spec.driver_version not in ("", loaded)
    ]
    if lacks_specification(state):
        log(f"containers get the GPU through CDI: generating {SPECIFICATION}")
        yield f"nvidia-ctk cdi generate --output={SPECIFICATION}"
        return
    if not stale:
        host.noop("CDI is not used" if not state.cdi else "CDI matches the driver")
    for spec in stale:
        log(f"{spec.path} is of driver {spec.driver_version}, {loaded} is loaded")
        yield f"nvidia-ctk cdi generate --output={shlex.quote(spec.path)}"


@operation()
@host_errors
def check_gpu_container(plan: DockerPlan) -> Commands:
    """Check that a container sees the GPU; the receipt is valid until a version changes."""
    state = read_state(plan)
    key = docker_engine.check_key(plan, state)
    receipt = state.receipt
    old = receipt.key if receipt else {}
    if receipt and not current_state.is_executing:
        # While docker is down, a prediction assumes unknown versions as they were.
        key = {name: value or old.get(name, "") for name, value in key.items()}
    if state.silent:
        log_once(f"no answer in time from {', '.join(state.silent)}; taken as unchanged", "yellow")
    # The engine is started with the receipt's arguments, so they count like a version.
    wanted = tuple(key["gpu_through"].split())
    if receipt and (old, receipt.docker_arguments) == (key, wanted):
        host.noop(f"a container saw {receipt.gpu} with these versions")
        return
    changes = [
        f"{name} {old.get(name)} -> {new}" for name, new in key.items() if old.get(name) != new
    ]
    if receipt and changes:
        log(f"changed since the last check: {', '.join(changes)}")
    yield FunctionCommand(docker_engine.check_gpu, [plan, fact_arguments(plan)], {})
