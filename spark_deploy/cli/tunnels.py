"""SSH tunnels of ``spark-deploy connect --tunnel``."""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack

from spark_deploy.cli.console import note
from spark_deploy.config.errors import SparkError, unreachable
from spark_deploy.config.printable import one_line
from spark_deploy.inventory.unreachable import ssh_reason

_POLL_S = 0.5


def hold_tunnels(servers: Sequence[tuple[str, str, str]]) -> None:
    """Keep tunnels of hosts (name, URL, command) open until Ctrl-C or a failure."""
    if not servers:
        raise SparkError.one("--tunnel", "no tunnel needed", "see `spark-deploy connect`")
    # A handler, so that Ctrl-C cannot interrupt between start and registration of a tunnel.
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
            if pressed:  # the tunnels received it, too
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
                    raise SparkError.one(name, problem, "close what uses the port, then try again")
