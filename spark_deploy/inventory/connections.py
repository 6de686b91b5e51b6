"""Connections to hosts: explain failures, limit output, and prevent prompts.

pyinfra fails on invalid UTF-8, keeps all output in memory, and prints it unchanged with ``-v``.
"""

import logging
import re
from collections.abc import Callable
from queue import Queue
from typing import Any, NoReturn

import gevent
from paramiko import AuthenticationException, ChannelFile
from paramiko.channel import ChannelStderrFile
from paramiko.ssh_exception import NoValidConnectionsError
from pyinfra import logger
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host
from pyinfra.api.output import echo
from pyinfra.connectors import ssh, util
from pyinfra.connectors.util import OutputLine

from spark_deploy.config.errors import SettingsError, printable_output

CHECK_NETWORK = "check that the host is on, and check its address and port"
BOOTSTRAP = "run `spark-deploy up` or deploys/bootstrap.py to install the key and sudo rule"
_REJECTED = "rejects our SSH key"
_UNKNOWN_KEY = "its host key is not in known_hosts, or differs from the recorded key"
# Messages of the ssh program.
_NETWORK_ERRORS = (
    re.compile(r"ssh: connect to host (?P<host>\S+) port (?P<port>\d+): (?P<reason>.+)"),
    re.compile(r"ssh: Could not resolve hostname (?P<host>\S+)(?P<port>): (?P<reason>.+)"),
    re.compile(r"Connection to (?P<host>\S+) port (?P<port>\d+) (?P<reason>timed out)"),
)
_REJECTION_ERRORS = (
    (re.compile(r"\S+: Permission denied \("), _REJECTED),
    (re.compile(r"Host key verification failed"), _UNKNOWN_KEY),
)


def network_reason(hostname: str, port: int | None, error: BaseException) -> str:
    if isinstance(error, NoValidConnectionsError):
        [(address, error), *_] = error.errors.items()
        _, port, *_ = address
    endpoint = hostname if port in (None, 22) else f"[{hostname}]:{port}"
    reason = getattr(error, "strerror", None) or str(error) or "closed the connection"
    return f"{endpoint}: {reason}"


def ssh_reason(output: str) -> tuple[str, str] | None:
    """Return why ssh could not connect, and the fix; return ``None`` if ssh connected."""
    for pattern in _NETWORK_ERRORS:
        if match := pattern.search(output):
            error = OSError(0, match["reason"].strip())
            return network_reason(match["host"], int(match["port"] or 22), error), CHECK_NETWORK
    for pattern, reason in _REJECTION_ERRORS:
        if pattern.search(output):
            return reason, BOOTSTRAP
    return None


def raise_connect_error(host: Host, message: str, data: object) -> NoReturn:
    """Raise ConnectError with our message; replaces pyinfra's function of this name."""
    reason, fix = f"{message} ({data})", ""
    if isinstance(data, AuthenticationException):
        reason, fix = _REJECTED, BOOTSTRAP
    elif "host key" in reason.lower():  # raised by pyinfra's policy
        reason, fix = _UNKNOWN_KEY, BOOTSTRAP
    elif isinstance(data, Exception):
        hostname, port = host.data.get("ssh_hostname") or host.name, host.data.get("ssh_port")
        reason = network_reason(hostname, int(port) if port else None, data)
        fix = CHECK_NETWORK
    advice = f"; fix: {fix}" if fix else ""
    raise ConnectError(f"unreachable: {reason}{advice}")


MAX_BYTES = 128 << 20
"""Limit per stream of a command; receipts of 100 checkpoints need a tenth of it."""
_LINE_BYTES = 64 << 20  # receipts have no line breaks
_MAX_LINES = 200_000
_LINES_PER_TURN = 1_000  # before reading output from other hosts
# Characters printed with -v; apt prints fewer.
_MAX_PRINTED_PER_LINE = 4_000
_MAX_PRINTED_PER_STREAM = 1 << 20


def read_buffer(
    name: str,
    io: Any,
    output_queue: Queue[OutputLine],
    print_output: bool = False,
    print_func: Callable[[str], str] | None = None,
) -> None:
    """Read a stream up to the limits; replaces pyinfra's function of this name."""
    received_bytes, lines, printable_characters = 0, 0, _MAX_PRINTED_PER_STREAM
    stream = _binary_stream(io)
    while data := stream.readline(_LINE_BYTES):
        line = data if isinstance(data, bytes) else data.encode(errors="replace")
        received_bytes, lines = received_bytes + len(line), lines + 1
        if lines % _LINES_PER_TURN == 0:
            gevent.sleep(0)
        if received_bytes > MAX_BYTES or lines > _MAX_LINES:
            output_queue.put(OutputLine(name, "(the output exceeds the limit and is cut here)"))
            # Closing the stream ends the command.
            (io.channel if isinstance(io, ChannelFile) else io).close()
            return
        text = printable_output(line.decode(errors="replace"))
        output_queue.put(OutputLine(name, text))
        if print_output and printable_characters > 0:
            limit = min(_MAX_PRINTED_PER_LINE, printable_characters - 1)
            if len(text) >= limit:
                text = f"{text[:limit]} (output truncated)"
            printable_characters -= len(text) + 1
            echo(print_func(text) if print_func else text, err=True)


def _binary_stream(io: Any) -> Any:
    """Return a stream of bytes, because paramiko's text stream fails on invalid UTF-8."""
    if isinstance(io, ChannelStderrFile):
        return io.channel.makefile_stderr("rb")
    return io.channel.makefile("rb") if isinstance(io, ChannelFile) else io


def _is_relevant(record: logging.LogRecord) -> bool:
    """Filter out pyinfra's warning about a known_hosts file that does not exist yet."""
    is_about_host_keys = str(record.msg).startswith("Failed to load host keys")
    arguments = record.args if isinstance(record.args, tuple) else ()
    return not (is_about_host_keys and isinstance(arguments[-1], FileNotFoundError))


def reject_prompt(prompt: str) -> NoReturn:
    """Raise SettingsError; replaces pyinfra's prompt, which puts the password into argv."""
    raise SettingsError.single("sudo", "needs a password", "run deploys/bootstrap.py once")


def patch_pyinfra() -> None:
    """Patch pyinfra to limit output, disable password prompts and explain failed connections."""
    util.read_buffer = read_buffer
    setattr(util, "getpass", reject_prompt)  # noqa: B010 - a name that util does not export
    setattr(ssh, "raise_connect_error", raise_connect_error)  # noqa: B010 - likewise
    logger.addFilter(_is_relevant)
    # paramiko also logs why a connection failed, which the raised error already says.
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
