"""Run a command on a host while waiting, surviving a lost connection."""

from __future__ import annotations

import time

import gevent
from paramiko import SSHException
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host

from spark_deploy.hosts.operations.commands import heartbeat, shell

# A reboot takes minutes; a host that is away for longer must not hold up the others.
AWAY_S = 420
COMMAND_TIMEOUT_S = 60
_LONGEST_PAUSE_S = 15


def run_reconnecting(host: Host, script: str) -> tuple[bool, str, str]:
    """Run ``script`` as root; return whether it exited with 0, its output and its errors.

    With or without sudo, as the host's settings say: a root login may have none installed.
    Reconnects with growing pauses when the connection is gone.

    Raises:
        ConnectError: the host stayed away for ``AWAY_S``.
    """
    lost_at, pause_s = None, 1
    with heartbeat(host, "waiting for an answer of the host"):
        while lost_at is None or time.monotonic() - lost_at < AWAY_S:
            try:
                answer = _once(host, script)
                # A connection that ends in the middle of a command looks like a failed command.
                if answer[0] or not dropped_out(host):
                    return answer
                lost = "closed"
            except (TimeoutError, OSError, EOFError, SSHException, ConnectError) as error:
                lost = type(error).__name__
            if lost_at is None:
                host.log(f"connection lost ({lost}), trying again")
                lost_at = time.monotonic()
            host.disconnect()
            gevent.sleep(pause_s)
            pause_s = min(pause_s + 1, _LONGEST_PAUSE_S)
    raise ConnectError(f"{host.name} stayed unreachable for {AWAY_S} s")


def _once(host: Host, script: str) -> tuple[bool, str, str]:
    if not host.connected:
        # Without raising, the next command would meet a client that has no connection.
        host.connect(show_errors=False, reason="still waiting", raise_exceptions=True)
    ok, output = host.run_shell_command(
        shell(script),
        _sudo=host.data.get("_sudo", False),
        _timeout=COMMAND_TIMEOUT_S,
    )
    return ok, output.stdout, output.stderr


def dropped_out(host: Host) -> bool:
    """Return whether the connection to a host we had reached is gone."""
    client = getattr(getattr(host, "connector", None), "client", None)
    if client is None:  # not over SSH: this machine itself
        return False
    transport = client.get_transport()
    return transport is None or not transport.is_active()
