"""Connection data for clients, and the SSH tunnels of ``connect --tunnel``."""

import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from spark_deploy.cli.console import note
from spark_deploy.config.errors import SparkError, one_line, unreachable
from spark_deploy.inventory.connections import ssh_reason

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Connection:
    host: str
    base_url: str
    port: int
    users: str  # who can use the URL
    model: str
    names: tuple[str, ...]
    key_path: str
    read_key: str
    tunnel: str | None  # a command that forwards a local port to the host
    ca: str | None  # a CA file for clients
    container: str | None  # base URL for containers on the host
    example: str  # a command that sends a request
    context_tokens: int | None = None  # maximum per request, if known
    task: str = "chat"


def hold_tunnels(servers: Sequence[tuple[str, str, str]]) -> None:
    """Keep tunnels (host, URL, command) open until Ctrl-C or a failure."""
    if not servers:
        fix = "run `spark-deploy connect` without --tunnel"
        raise SparkError.one("--tunnel", "these hosts need no tunnel", fix)
    # Without this handler, Ctrl-C could interrupt between the start and registration of a tunnel.
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    with ExitStack() as stack:
        running: list[tuple[str, subprocess.Popen[str]]] = []
        for host, url, tunnel in servers:
            command = shlex.split(tunnel)
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            stack.callback(process.wait, timeout=20)
            stack.callback(process.terminate)
            running.append((host, process))
            note(f"{host}: {url}")
        note("tunnels stay open until Ctrl-C")
        while True:
            time.sleep(_POLL_S)
            if interrupts:  # the tunnels have also received the signal
                note("")
                return
            for name, process in running:
                if process.poll() is not None:
                    output = process.stderr.read() if process.stderr else ""
                    if reason := ssh_reason(output):
                        raise SparkError([unreachable(name, *reason)])
                    problem = (
                        f"tunnel ended with exit code {process.returncode}: {one_line(output)}"
                    )
                    fix = "stop the program that uses the port, then run the command again"
                    raise SparkError.one(name, problem, fix)
