"""Run a command on a host while waiting, surviving a lost connection."""

from __future__ import annotations

import shlex

import gevent
from paramiko import SSHException
from pyinfra.api.command import StringCommand
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host

ATTEMPTS = 40
COMMAND_TIMEOUT_S = 60


def poll(host: Host, script: str) -> tuple[bool, str, str]:
    """Run ``script`` as root; return whether it exited with 0, its output and its errors.

    Reconnects with growing pauses when the connection is gone (a reboot takes minutes).

    Raises:
        ConnectError: the host stayed away for about ten minutes.
    """
    for attempt in range(ATTEMPTS):
        try:
            ok, output = host.run_shell_command(
                StringCommand("sh", "-c", shlex.quote(script)),
                _sudo=True,
                _timeout=COMMAND_TIMEOUT_S,
            )
            return ok, output.stdout, output.stderr
        except (TimeoutError, OSError, EOFError, SSHException, ConnectError) as error:
            if attempt == 0:
                host.log(f"connection lost ({type(error).__name__}), trying again")
            gevent.sleep(min(1 + attempt, 20))
            host.disconnect()
            try:
                host.connect(show_errors=False, reason="still waiting")
            except ConnectError:
                continue
    raise ConnectError(f"{host.name} stayed unreachable")
