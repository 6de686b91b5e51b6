"""The first process of an engine's container, held so that it can be ended without docker.

A host that runs out of memory takes the docker daemon along first, and ending the docker client
leaves the container alone. The handle belongs to one process for good: its number may be given to
another one, the handle may not.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from spark_host.system import docker
from spark_host.system.programs import log

_ANSWER_S = 5.0
_KILL_S = 20.0


def hold(container: str) -> int | None:
    """Return a handle of a running container's first process; ``None`` when it cannot be had now.

    With that process the kernel ends all others of the container.
    """
    known = docker.container(container, _ANSWER_S) or {}
    pid = int((known.get("State") or {}).get("Pid") or 0)
    if pid <= 0:
        return None
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    if _is_of(pid, str(known["Id"])):
        return handle
    os.close(handle)
    return None


def kill(handle: int) -> None:
    """End the process at once; one that has ended already is fine."""
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return


def end(container: str, handle: int | None) -> str:
    """End a container by the handle of its first process; else docker is asked to.

    Returns what stood in the way, or ``""``.
    """
    if handle is not None:
        try:
            kill(handle)
        except PermissionError as error:  # whatever keeps us from it, docker may
            log(f"{container} is not ended by its process: {error}")
        else:
            return ""
    said = docker.client("kill", container, timeout_s=_KILL_S)
    return f"docker kill: {said.stderr.strip()}" if said.returncode != 0 else ""


def _is_of(pid: int, container_id: str) -> bool:
    """Return whether a process belongs to a container, by the name of its control group."""
    try:
        return container_id in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False
