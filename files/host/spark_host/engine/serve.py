"""Start and stop of one release: the steps of ``spark-serve@<release>.service``."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from spark_contract.errors import HostToolError
from spark_contract.paths import ENGINE_SOCKET, Paths
from spark_contract.release import Release
from spark_contract.tool import PHASE
from spark_contract.units import DIGEST_LABEL, RELEASE_LABEL, SERVE, SERVICE_LABEL, SWITCH

from spark_host.engine import compile_cache, memory, metrics, tree
from spark_host.engine.client import Engine
from spark_host.engine.container import account, cdi, environment
from spark_host.gateway import traffic
from spark_host.records import boot
from spark_host.system import docker, folders, members
from spark_host.system.ports import Host
from spark_host.system.programs import Report, log
from spark_host.system.stored import load

# While an engine loads it measures what memory is free and takes its share of it; another one
# that loads beside it would falsify that.


def take_turn(release: Release, host: Host, report: Report) -> None:
    """Return once no other engine is starting, and have others wait for this one.

    Whose turn it is ends with its start, however that ends: systemd is asked, so nothing is left
    to clean up. After the time that a start may take at most, this one goes on beside the other.
    """
    deadline = host.clock.monotonic() + release.timeouts.start_s
    while (other := _starting(release, host)) is not None:
        if host.clock.monotonic() > deadline:
            report(f"{PHASE}turn does not wait any longer for the start of {other}")
            return
        report(f"{PHASE}turn waiting for the start of {other}")
        host.clock.sleep(2)


def _starting(release: Release, host: Host) -> str | None:
    """Return the release whose turn it is; without one it is this release's from now on."""
    descriptor = os.open(host.paths.run / "starting", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        other = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        if other and other != release.name and _is_activating(other, host):
            return other
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{release.name}\n".encode(), 0)
        return None
    finally:
        os.close(descriptor)


def _is_activating(name: str, host: Host) -> bool:
    unit = SERVE.of(name)
    state = host.units.show([unit], ["ActiveState", "SubState"]).get(unit, {})
    # Between two starts systemd says activating as well, for a minute in which nothing is loaded.
    return state.get("ActiveState") == "activating" and state.get("SubState") != "auto-restart"


_DOCKER_WAIT_S = 90.0


def may_start(name: str, paths: Paths) -> int:
    """Return 0 when the unit may start, 1 when systemd shall skip it quietly."""
    release = load(name, paths)
    obstacle = boot.obstacle(release, Host(paths))
    if obstacle is not None:
        log(f"not starting {name}: {obstacle}")
        return 1
    return 0


def prepare(name: str, paths: Paths) -> int:
    """Make the host ready for a start: traffic closed, no leftovers, CDI current, memory free."""
    release = load(name, paths)
    _refuse_beside(_lock_holder(release.service, paths), release)
    traffic.close(release.service, paths)
    _wait_for_docker()
    docker.remove_container(release.container)
    cdi.refresh(log, paths)
    docker.gpu_arguments(paths)
    _prove_parts(release)
    tree.prove(release, log)
    take_turn(release, Host(paths), log)
    memory.wait_for_memory(release, log)
    memory.prepare_blocks(release, log)
    _make_folders(release, paths)
    compile_cache.prepare(release, Host(paths), log)
    return 0


def _make_folders(release: Release, paths: Paths) -> None:
    """Have what opens traffic in a folder of root, and the socket in one of the engine's own."""
    service, own = release.service, paths.engine_run(release.service)
    traffic.make_folder(service, paths)
    own.parent.mkdir(mode=0o755, exist_ok=True)
    folders.give(own, account.number(release), traffic.group_of(service, paths), 0o710)
    folders.empty(own)


def run(name: str, paths: Paths) -> int:
    """Become the engine's ``docker run``; the lock is held for the life of the process."""
    release = load(name, paths)
    argv = docker_argv(release, paths)
    _take_engine_lock(release, paths)
    environment.write(release, paths)
    log(f"starting {release.container}: {release.image.tag}")
    os.execvpe("docker", argv, docker.client_environment())


def stop(name: str, paths: Paths) -> int:
    """Ask the engine to stop and wait; Docker kills it after ``stop_s``."""
    release = load(name, paths)
    seconds = int(release.timeouts.stop_s)
    said = docker.client("stop", "-t", str(seconds), release.container, timeout_s=seconds + 60)
    if said.returncode != 0 and "No such container" not in said.stderr:
        log(f"docker stop: {said.stderr.strip()}")
    return 0


def after_stop(name: str, paths: Paths) -> int:
    """Leave nothing behind, however the engine ended; another release's things stay."""
    release = load(name, paths)
    alone = _lock_holder(release.service, paths) in (None, release.name)
    if alone:  # before docker is asked, which may take its time
        traffic.close(release.service, paths)
    docker.remove_container(release.container)
    environment.remove(release, paths)
    if alone:
        folders.empty(paths.engine_run(release.service))
    return 0


def docker_argv(release: Release, paths: Paths) -> list[str]:
    """Return the ``docker run`` command line; values of the environment never enter it."""
    argv = ["docker", "run", "--rm", "--restart", "no", "--name", release.container]
    argv += ["--label", f"{RELEASE_LABEL}={release.name}"]
    argv += ["--label", f"{SERVICE_LABEL}={release.service}"]
    # The journal holds the log, once; the client still streams it with this driver.
    argv += ["--log-driver", "none"]
    outside, inside = paths.engine_run(release.service), Path(ENGINE_SOCKET).parent
    argv += ["--mount", f"type=bind,source={outside},target={inside}"]
    for mount in release.mounts:
        text = f"type=bind,source={mount.source},target={mount.target}"
        argv += ["--mount", text + (",readonly" if mount.read_only else "")]
    argv += ["--env-file", str(paths.engine_environment(release.name))]
    argv += account.docker_arguments(release)
    argv += docker.gpu_arguments(paths)
    argv += release.engine.docker_args
    member = members.own(release, paths)
    if member is None:
        return [*argv, release.image.tag, *release.engine.argv]
    return [*argv, *member.docker_args, release.image.tag, *release.engine.argv, *member.argv]


def _take_engine_lock(release: Release, paths: Paths) -> None:
    descriptor = _open_lock(release.service, paths)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _refuse_beside(_name_in(descriptor), release)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{release.name}\n".encode(), 0)
    os.set_inheritable(descriptor, True)


def _lock_holder(service: str, paths: Paths) -> str | None:
    """Return the release of a service whose engine runs; ``None`` when the lock is free."""
    descriptor = _open_lock(service, paths)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _name_in(descriptor)
    else:
        return None
    finally:
        os.close(descriptor)


def _open_lock(service: str, paths: Paths) -> int:
    paths.run.mkdir(mode=0o755, parents=True, exist_ok=True)
    return os.open(paths.engine_lock(service), os.O_RDWR | os.O_CREAT, 0o600)


def _name_in(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "one without a name"


def _refuse_beside(holder: str | None, release: Release) -> None:
    if holder is not None:
        raise HostToolError(
            "engine lock",
            f"the engine of {holder} runs on this host",
            f"change over with: systemctl start {SWITCH.of(release.name)}",
        )


def _wait_for_docker() -> None:
    deadline = time.monotonic() + _DOCKER_WAIT_S
    while not docker.is_up():
        if time.monotonic() > deadline:
            raise HostToolError(
                "docker",
                f"does not answer after {_DOCKER_WAIT_S:.0f} s",
                "systemctl status docker",
            )
        log(f"{PHASE}docker waiting for the docker daemon")
        time.sleep(2)


def _prove_parts(release: Release) -> None:
    problem = part_problem(release)
    if problem is not None:
        raise problem


def part_problem(release: Release) -> HostToolError | None:
    """Return what is wrong with the release's image or tree; ``None`` when both are proven."""
    try:
        return (
            metrics.problem(release)
            or _image_problem(release)
            or tree.problem(release)
            or account.tree_problem(release)
        )
    except docker.DaemonSilent as error:
        return error


def _image_problem(release: Release) -> HostToolError | None:
    image = release.image
    where, fix = f"image {image.tag}", "run the deploy again"
    if docker.image(image.tag) is None:
        return HostToolError(where, "not on this host", fix)
    if image.digest_label is not None:
        label = docker.image_label(image.tag)
        if label != image.digest_label:
            what = f"label {DIGEST_LABEL} is {label!r}, the release wants {image.digest_label!r}"
            return HostToolError(where, what, fix)
    return None


def problem(release: Release, paths: Paths) -> HostToolError | None:
    """Return why no engine of this release could be started; ``None`` when one could.

    What was touched of its tree is hashed here, while the engine before it still serves.
    """
    found = (
        part_problem(release)
        or docker.gpu_problem(paths)
        or memory.problem(release.memory.needed_bytes)
    )
    if found is not None:
        return found
    try:
        tree.prove(release, log)
    except HostToolError as error:
        return error
    return None


def make_room(release: Release, report: Report) -> None:
    """Remove every container of this service and return once this release's memory is free."""
    for container in docker.engine_containers(release.service):
        docker.remove_container(container)
    memory.wait_for_memory(release, report)


def unfinished(release: Release, paths: Paths) -> float:
    """Return how many requests the engine of a release has not answered yet.

    Raises:
        SilentError: It did not say so in time.
        EngineError: It is not there, or answers an error.
    """
    return Engine.of(release, paths).metrics(5).unfinished
