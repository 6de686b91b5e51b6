"""Run a command on a host while waiting, surviving a lost connection."""

from __future__ import annotations

import shlex

import gevent
from paramiko import SSHException
from pyinfra.api.command import StringCommand
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host

from spark_deploy.operations.running import talking

ATTEMPTS = 40
COMMAND_TIMEOUT_S = 60


def poll(host: Host, script: str) -> tuple[bool, str, str]:
    """Run ``script`` as root; return whether it exited with 0, its output and its errors.

    Reconnects with growing pauses when the connection is gone (a reboot takes minutes).

    Raises:
        ConnectError: the host stayed away for about ten minutes.
    """
    with talking(host, "waiting for an answer of the host"):
        for attempt in range(ATTEMPTS):
            try:
                if not host.connected:
                    # Without raising, the next command would meet a client that has no connection.
                    host.connect(show_errors=False, reason="still waiting", raise_exceptions=True)
                ok, output = host.run_shell_command(
                    StringCommand("sh", "-c", shlex.quote(script)),
                    _sudo=True,
                    _timeout=COMMAND_TIMEOUT_S,
                )
                return ok, output.stdout, output.stderr
            except (TimeoutError, OSError, EOFError, SSHException, ConnectError) as error:
                if attempt == 0:
                    host.log(f"connection lost ({type(error).__name__}), trying again")
                host.disconnect()
                gevent.sleep(min(1 + attempt, 20))
    raise ConnectError(f"{host.name} stayed unreachable")
