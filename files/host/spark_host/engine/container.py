"""The engine's container: ``docker run`` command, account, environment, GPU and processes."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from spark_contract import files
from spark_contract.machine import libcuda_version
from spark_contract.paths import ENGINE_SOCKET, Paths
from spark_contract.release import Release
from spark_contract.tool import HostToolError
from spark_contract.units import RELEASE_LABEL, SERVICE_LABEL

from spark_host.records import versions
from spark_host.system import cluster, docker
from spark_host.system.host import find_account
from spark_host.system.programs import ProgramTimeoutError, Report, log, read_output

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_LINE_BYTES = 60_000  # the docker client rejects lines above 64 KiB
_INSPECT_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 20.0


def docker_argv(release: Release, paths: Paths) -> list[str]:
    """Return the ``docker run`` command, without the engine's variables."""
    run_folder, socket_folder = paths.engine_run(release.service), Path(ENGINE_SOCKET).parent
    user = find_account(release.engine.user)
    argv = ["docker", "run", "--rm", "--restart", "no", "--name", release.container]
    argv += ["--label", f"{RELEASE_LABEL}={release.name}"]
    argv += ["--label", f"{SERVICE_LABEL}={release.service}"]
    # Docker keeps no log: the client writes it to the journal.
    argv += ["--log-driver", "none"]
    argv += ["--mount", f"type=bind,source={run_folder},target={socket_folder}"]
    for mount in release.mounts:
        text = f"type=bind,source={mount.source},target={mount.target}"
        argv += ["--mount", text + (",readonly" if mount.read_only else "")]
    argv += ["--env-file", str(paths.engine_environment(release.name))]
    # Use numbers, because the image has different accounts.
    argv += ["--user", f"{user.pw_uid}:{user.pw_gid}"]
    argv += docker.gpu_arguments(paths)
    argv += release.engine.docker_args
    member = cluster.local_member(release, paths)
    if member is None:
        return [*argv, release.image.tag, *release.engine.argv]
    return [*argv, *member.docker_args, release.image.tag, *release.engine.argv, *member.argv]


def write_environment(release: Release, paths: Paths) -> None:
    """Write the file for ``docker run --env-file``, readable only by root.

    The docker client must not get these variables, because it obeys LD_PRELOAD and DOCKER_HOST.
    """
    member = cluster.local_member(release, paths)
    variables = {**release.engine.env, **(member.env if member else {})}
    lines = [_environment_line(name, value) for name, value in sorted(variables.items())]
    files.write_text(paths.engine_environment(release.name), "".join(lines), 0o600)


def _environment_line(name: str, value: str) -> str:
    line = f"{name}={value}\n"
    if not _VARIABLE.fullmatch(name):
        problem = f"invalid variable name {name!r}"
    elif any(letter in value for letter in "\n\r\0"):
        problem = f"the value of {name} contains a line break or a zero byte"
    elif len(line.encode()) > _MAX_LINE_BYTES:
        problem = f"the value of {name} is longer than {_MAX_LINE_BYTES} bytes"
    else:
        return line
    raise HostToolError("engine environment", problem, "change it, then deploy again", 2)


def refresh_cdi(report: Report, paths: Paths) -> None:
    """Regenerate CDI specifications after a driver update.

    A specification lists files of one driver version, so containers fail with another version.
    """
    suffixes = (".yaml", ".json")
    specs = [path for path in (paths.root / "etc/cdi").glob("*") if path.suffix in suffixes]
    try:
        driver = versions.read_driver() if specs else ""
    except ProgramTimeoutError as error:
        report(f"cannot compare the CDI specifications with the driver: {error}")
        return
    if not driver:
        return
    for spec in sorted(specs):
        text = spec.read_text(errors="replace")
        version = libcuda_version(text)
        if "nvidia.com/gpu" not in text or version in ("", driver):
            continue
        report(f"regenerating {spec} for driver {driver}, because it was made for driver {version}")
        if read_output("nvidia-ctk", "cdi", "generate", f"--output={spec}") is None:
            # Containers may get the GPU without CDI.
            command = f"nvidia-ctk cdi generate --output={spec}"
            report(f"cannot regenerate it; run `{command}` to see the error")


def open_process(container: str) -> int | None:
    """Return a pidfd of a running container's first process, or None if it cannot be found.

    Killing this process stops the container even when docker fails for lack of memory.
    """
    state = docker.inspect_container(container, _INSPECT_TIMEOUT_S) or {}
    pid = int((state.get("State") or {}).get("Pid") or 0)
    if pid <= 0:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    # The process may have exited, and the number may belong to a new process.
    with suppress(OSError):
        if str(state["Id"]) in Path(f"/proc/{pid}/cgroup").read_text():
            return pidfd
    os.close(pidfd)
    return None


def kill_container(container: str, pidfd: int | None) -> str:
    """Kill the process of ``pidfd``; if that fails, use `docker kill`. Return the error or ""."""
    if pidfd is not None:
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return ""
        except PermissionError as error:
            log(f"cannot kill the first process of {container}: {error}")
        else:
            return ""
    result = docker.client("kill", container, timeout_s=_KILL_TIMEOUT_S)
    return f"docker kill: {result.stderr.strip()}" if result.returncode != 0 else ""
