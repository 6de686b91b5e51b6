"""Start and stop of a release: the steps of ``spark-serve@<release>.service``.

Image and checkpoints are verified before each start.
"""

import fcntl
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

from spark_contract import files, receipts
from spark_contract.builder_api import BUILDER, VERIFY
from spark_contract.machine import GIB
from spark_contract.paths import Paths
from spark_contract.release import Release
from spark_contract.tool import PHASE, HostToolError, parse_problem
from spark_contract.units import DIGEST_LABEL, SERVE, SWITCH

from spark_host.engine import compile_cache, container, memory, on_request
from spark_host.engine.client import Engine
from spark_host.engine.memory import meminfo
from spark_host.gateway import gateway
from spark_host.records import boot
from spark_host.system import docker, folders
from spark_host.system.host import Host, find_account, load_release
from spark_host.system.programs import Report, log

_DOCKER_TIMEOUT_S = 90.0
_FIX = "run the deploy again"


def may_start(name: str, paths: Paths) -> int:
    """Return 1 if systemd must skip the start, which does not count as a failure."""
    release = load_release(name, paths)
    obstacle = boot.reason_not_to_start(release, Host(paths))
    if obstacle is not None:
        log(f"not starting {name}: {obstacle}")
    return int(obstacle is not None)


def prepare(name: str, paths: Paths) -> int:
    """Close traffic, remove leftovers, verify artifacts and free memory."""
    release, host = load_release(name, paths), Host(paths)
    _reject_second_engine(release, _lock_holder(release.service, paths))
    gateway.close_traffic(release.service, paths)
    _wait_for_docker()
    docker.remove_container(release.container)
    container.refresh_cdi(log, paths)
    docker.gpu_arguments(paths)
    check_artifacts(release)
    verify_checkpoints(release, log)
    wait_for_turn(release, host, log)
    on_request.free_memory(release, host, log)
    memory.wait_for_memory(release, log)
    memory.prepare_blocks(release, log)
    gateway.make_traffic_folder(release.service, paths)
    socket_folder = paths.engine_run(release.service)
    socket_folder.parent.mkdir(mode=0o755, exist_ok=True)
    owner = find_account(release.engine.user).pw_uid
    group = gateway.group_id(release.service, paths)
    folders.create(socket_folder, owner, group, 0o710)
    folders.remove_entries(socket_folder)
    compile_cache.prepare(release, host, log)
    return 0


def run(name: str, paths: Paths) -> int:
    """Lock the engine, then replace this process with ``docker run``, which keeps the lock."""
    release = load_release(name, paths)
    argv = container.docker_argv(release, paths)
    lock = _open_lock(release.service, paths)
    _reject_second_engine(release, _lock_or_read_holder(lock))
    _write_name(lock, release)
    os.set_inheritable(lock, True)
    container.write_environment(release, paths)
    log(f"starting {release.container}: {release.image.tag}")
    os.execvpe("docker", argv, docker.client_environment())


def stop(name: str, paths: Paths) -> int:
    release = load_release(name, paths)
    seconds = int(release.timeouts.stop_s)
    result = docker.client("stop", "-t", str(seconds), release.container, timeout_s=seconds + 60)
    if result.returncode != 0 and "No such container" not in result.stderr:
        log(f"docker stop: {result.stderr.strip()}")
    return 0


def after_stop(name: str, paths: Paths) -> int:
    """Clean up after the engine, unless another release already uses the service's files."""
    release = load_release(name, paths)
    owns_files = _lock_holder(release.service, paths) in (None, release.name)
    if owns_files:  # before docker, which may be slow
        gateway.close_traffic(release.service, paths)
    docker.remove_container(release.container)
    files.remove(paths.engine_environment(release.name))
    if owns_files:
        folders.remove_entries(paths.engine_run(release.service))
    return 0


def find_artifact_problem(release: Release) -> HostToolError | None:
    try:
        check_artifacts(release)
    except HostToolError as error:
        return error
    return None


def find_problem(release: Release, paths: Paths) -> HostToolError | None:
    """Return why an engine of this release cannot start.

    Changed files are hashed here, while the previous engine serves.
    """
    try:
        check_artifacts(release)
        docker.gpu_arguments(paths)
        needed_gib, total_gib = release.memory.needed_bytes / GIB, meminfo()["MemTotal"] / GIB
        if needed_gib > total_gib:
            message = f"{needed_gib:.1f} GiB is needed, but the host has only {total_gib:.1f} GiB"
            raise HostToolError("memory", message, "choose a smaller model, context or profile")
        verify_checkpoints(release, log)
    except HostToolError as error:
        return error
    return None


def make_room(release: Release, host: Host, report: Report) -> None:
    for name in docker.engine_containers(release.service):
        docker.remove_container(name)
    on_request.free_memory(release, host, report)
    memory.wait_for_memory(release, report)


def count_unfinished(release: Release, paths: Paths) -> float:
    return Engine.for_release(release, paths).metrics(5).unfinished


def _wait_for_docker() -> None:
    deadline = time.monotonic() + _DOCKER_TIMEOUT_S
    while not docker.is_up():
        if time.monotonic() > deadline:
            message = f"did not respond within {_DOCKER_TIMEOUT_S:.0f} s"
            raise HostToolError("docker", message, "run `systemctl status docker`")
        log(f"{PHASE}docker waiting for the docker daemon")
        time.sleep(2)


def wait_for_turn(release: Release, host: Host, report: Report) -> None:
    """Claim the turn to start; first wait while another engine starts, but not forever.

    vLLM measures free memory while it loads, so two engines that start together would miscount it.
    """
    deadline = host.clock.monotonic() + release.timeouts.start_s
    while (other := _claim_turn(release, host)) is not None:
        if host.clock.monotonic() > deadline:
            reason = f"{other} did not finish starting within the time limit"
            report(f"{PHASE}turn starting now, because {reason}")
            return
        report(f"{PHASE}turn waiting until {other} has started")
        host.clock.sleep(2)


def _claim_turn(release: Release, host: Host) -> str | None:
    """Return another release that is starting, or claim the turn and return ``None``."""
    descriptor = os.open(host.paths.run / "starting", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        other = _read_name(descriptor)
        if other and other != release.name:
            unit = SERVE.unit(other)
            state = host.units.show([unit], ["ActiveState", "SubState"]).get(unit, {})
            # A unit that waits for a restart is not loading.
            is_waiting = state.get("SubState") == "auto-restart"
            if state.get("ActiveState") == "activating" and not is_waiting:
                return other
        _write_name(descriptor, release)
        return None
    finally:
        os.close(descriptor)


def _open_lock(service: str, paths: Paths) -> int:
    paths.run.mkdir(mode=0o755, parents=True, exist_ok=True)
    return os.open(paths.engine_lock(service), os.O_RDWR | os.O_CREAT, 0o600)


def _lock_or_read_holder(descriptor: int) -> str | None:
    """Lock a file and return ``None``, or return the release that holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_name(descriptor) or "unknown"
    return None


def _lock_holder(service: str, paths: Paths) -> str | None:
    """Return the release that holds the service's lock; ``None`` if the lock is free."""
    descriptor = _open_lock(service, paths)
    try:
        return _lock_or_read_holder(descriptor)
    finally:
        os.close(descriptor)


def _read_name(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip()


def _write_name(descriptor: int, release: Release) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{release.name}\n".encode(), 0)


def _reject_second_engine(release: Release, holder: str | None) -> None:
    if holder is not None:
        message = f"the engine of {holder} is running on this host"
        fix = f"run `systemctl start {SWITCH.unit(release.name)}` to switch to this release"
        raise HostToolError("engine lock", message, fix)


def check_artifacts(release: Release) -> None:
    tag, expected = release.image.tag, release.image.digest_label
    if docker.inspect_image(tag) is None:
        raise HostToolError(f"image {tag}", "not on this host", _FIX)
    label = docker.image_label(tag) if expected is not None else None
    if label != expected:
        message = f"label {DIGEST_LABEL} is {label!r}, but the release requires {expected!r}"
        raise HostToolError(f"image {tag}", message, _FIX)
    check_checkpoints(release)


def check_checkpoints(release: Release) -> None:
    for tree in release.trees:
        where, path = f"checkpoint {tree.path}", Path(tree.path)
        receipt = receipts.find_receipt(path)
        digest = receipt.digest if receipt else None
        if digest != tree.digest:
            message = f"receipt digest is {digest!r}, but the release requires {tree.digest!r}"
            raise HostToolError(where, message, _FIX)
        problem = receipts.find_writable_by_others(path)
        if problem is not None:
            fix = f"{_FIX} to rebuild the checkpoint from files that root owns"
            raise HostToolError(where, problem, fix)
        _check_readable(path, release.engine.user)


def _check_readable(root: Path, user: str) -> None:
    for folder, _, names in os.walk(root):
        for path in (Path(folder), *(Path(folder) / name for name in names)):
            needed = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
            if path.stat().st_mode & needed != needed:
                message = f"cannot be read by {user}, the engine's account"
                fix = f"run `chmod o+rX {path}`, then deploy again"
                raise HostToolError(str(path), message, fix)


def verify_checkpoints(release: Release, report: Report) -> None:
    for tree in release.trees:
        _verify_changed_files(Path(tree.path), report)


def _verify_changed_files(path: Path, report: Report) -> None:
    """Hash files with a changed size, time or inode; raise HostToolError if a file is damaged."""
    receipt = receipts.find_receipt(path)
    changed = receipt.changed_files(path) if receipt else ()
    if receipt is None or not changed:
        return
    report(
        f"{PHASE}verify hashing {len(changed)} of {len(receipt.files)} files of {path} again, "
        f"because they changed since they were last hashed (for example {changed[0]})"
    )
    # This takes minutes; the progress goes to the journal.
    result = subprocess.run(
        [sys.executable, "-m", BUILDER, VERIFY, str(path)],
        stderr=subprocess.PIPE, text=True, errors="replace", check=False,
    )  # fmt: skip
    if result.returncode == 0:
        return
    error_text = result.stderr.strip()
    problem = parse_problem(error_text.splitlines()[-1]) if error_text else None
    if problem is not None:
        raise HostToolError(problem.where, problem.what, problem.fix)
    message = f"cannot be verified: {error_text[-200:] or f'exit {result.returncode}'}"
    raise HostToolError(f"checkpoint {path}", message, _FIX)
