"""The connection of a client to a server, and SSH tunnels of ``connect --tunnel``."""

import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from spark_deploy.cli.console import note
from spark_deploy.config.errors import SparkError, unreachable
from spark_deploy.config.printable import one_line
from spark_deploy.inventory.unreachable import ssh_reason

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Connection:
    host: str
    base_url: str
    port: int
    users: str
    model: str
    names: tuple[str, ...]
    key_path: str
    read_key: str
    tunnel: str | None  # a command that forwards a local port to the host
    ca: str | None  # a CA file for clients
    container: str | None  # base URL inside containers of the host
    example: str
    context_tokens: int | None = None  # of the longest request, if known
    task: str = "chat"


def hold_tunnels(servers: Sequence[tuple[str, str, str]]) -> None:
    """Keep tunnels, each with host, URL and command, open until Ctrl-C or a failure."""
    if not servers:
        raise SparkError.one("--tunnel", "no tunnel needed", "see `spark-deploy connect`")
    # The handler prevents an interruption between start and registration of a tunnel.
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
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
        note("open until Ctrl-C")
        while True:
            time.sleep(_POLL_S)
            if pressed:  # the tunnels have received the signal, too
                note("")
                return
            for name, process in running:
                if process.poll() is not None:
                    output = process.stderr.read() if process.stderr else ""
                    if unreached := ssh_reason(output):
                        raise SparkError([unreachable(name, *unreached)])
                    problem = (
                        f"tunnel ended with exit code {process.returncode}: {one_line(output)}"
                    )
                    fix = "stop the program that uses the port, then try again"
                    raise SparkError.one(name, problem, fix)
