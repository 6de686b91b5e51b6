"""SSH tunnels to gateways that listen on their host alone, held open for a person."""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack

from spark_deploy.cli.hosts import say
from spark_deploy.errors import SparkError

_LOOK_EVERY_S = 0.5


def hold_tunnels(tunnels: Sequence[tuple[str, str, str]]) -> None:
    """Keep tunnels open until one ends or somebody presses Ctrl-C.

    Args:
        tunnels: host, the URL that its tunnel makes work here, and the command of the tunnel.

    Raises:
        SparkError: there is none to hold, or one ended by itself.
    """
    if not tunnels:
        raise SparkError.one("--tunnel", "these hosts need none", "see `spark-deploy connect`")
    # Ctrl-C is noted, so that it comes between no tunnel and the note that it has to be ended.
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    with ExitStack() as held:
        running: list[tuple[str, subprocess.Popen[bytes]]] = []
        for host, base_url, command in tunnels:
            process = subprocess.Popen(shlex.split(command), stdin=subprocess.DEVNULL)
            held.callback(_end, process)
            running.append((host, process))
            say(f"{host}: {base_url}")
        say("open until Ctrl-C")
        while True:
            time.sleep(_LOOK_EVERY_S)
            if pressed:  # which ended the tunnels as well
                say("")
                return
            for host, process in running:
                if process.poll() is not None:
                    what = f"its tunnel ended with exit code {process.returncode}"
                    raise SparkError.one(host, what, "read what ssh says above, and try again")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(timeout=20)
