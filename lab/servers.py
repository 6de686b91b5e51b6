"""The lab's servers, in the cgroup ``lab/host``: packages, model hub, image registry, proxy."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab import cgroup
from lab.errors import LabError
from lab.paths import APT_PORT, HOST_IP, HUB_PORT, PROXY_IP, PROXY_PORT, REGISTRY_PORT, LabPaths

HOST_TREE = "host"

_REGISTRY_CONFIG = """\
version: 0.1
log: {{level: warn}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: true}}
http:
  addr: {address}
"""


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    port: int
    argv: Callable[[LabPaths], list[str]]
    mark: str
    ip: str = HOST_IP


def _python(name: str) -> Callable[[LabPaths], list[str]]:
    return lambda paths: [sys.executable, "-m", "lab", f"_{name}"]


def _registry_argv(paths: LabPaths) -> list[str]:
    config = paths.run / "registry.yml"
    address = f"{HOST_IP}:{REGISTRY_PORT}"
    config.write_text(_REGISTRY_CONFIG.format(root=paths.registry, address=address))
    return ["/usr/bin/docker-registry", "serve", str(config)]


_PROXY_CONFIG = f"""\
Port {PROXY_PORT}
Listen {PROXY_IP}
Timeout 600
MaxClients 200
LogLevel Connect
"""


def _proxy_argv(paths: LabPaths) -> list[str]:
    config = paths.run / "proxy.conf"
    config.write_text(_PROXY_CONFIG)
    return ["/usr/bin/tinyproxy", "-d", "-c", str(config)]


SERVERS = {
    server.name: server
    for server in (
        Server("packages", APT_PORT, _python("packages"), "_packages"),
        Server("hub", HUB_PORT, _python("hub"), "_hub"),
        Server("registry", REGISTRY_PORT, _registry_argv, "docker-registry"),
        Server("proxy", PROXY_PORT, _proxy_argv, "tinyproxy", PROXY_IP),
    )
}


def running_pid(paths: LabPaths, name: str) -> int | None:
    """Return the running server's pid; after a reboot another server may have the recorded pid."""
    try:
        pid = int((paths.run / f"{name}.pid").read_text())
    except (FileNotFoundError, ValueError):
        return None
    if pid not in cgroup.pids(HOST_TREE):
        return None
    return pid if SERVERS[name].mark in _command_line(pid) else None


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def start(paths: LabPaths, name: str) -> None:
    server = SERVERS[name]
    if running_pid(paths, name) is not None:
        return
    if _accepts_connections(server):
        raise LabError(
            f"server {name}", f"another program listens on port {server.port}",
            "find it with `ss -ltnp` and stop it; for another lab run `lab down`",
        )  # fmt: skip
    paths.run.mkdir(parents=True, exist_ok=True)
    cgroup.create(HOST_TREE)
    with (paths.run / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            server.argv(paths), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
            start_new_session=True, preexec_fn=lambda: cgroup.enter(HOST_TREE),
        )  # fmt: skip
    (paths.run / f"{name}.pid").write_text(str(process.pid))
    _wait_for_port(paths, server, process)


def _wait_for_port(paths: LabPaths, server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if _accepts_connections(server):
            return
        time.sleep(0.05)
    log = paths.run / f"{server.name}.log"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
    raise LabError(f"server {server.name}", f"did not start\n{tail}", f"read {log}")


def _accepts_connections(server: Server) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((server.ip, server.port)) == 0


def stop(paths: LabPaths, name: str) -> None:
    pid = running_pid(paths, name)
    if pid is None:
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 5
    while pid in cgroup.pids(HOST_TREE) and not _is_zombie(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    (paths.run / f"{name}.pid").unlink(missing_ok=True)


def _is_zombie(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def stop_all(paths: LabPaths) -> None:
    for name in SERVERS:
        stop(paths, name)
    cgroup.kill(HOST_TREE)
    cgroup.remove(HOST_TREE)
