"""Limit the output of hosts, and replace characters that could control a terminal.

pyinfra fails on invalid UTF-8, keeps any amount in memory, and prints it unchanged with ``-v``.
"""

import logging
from collections.abc import Callable
from queue import Queue
from typing import Any

import gevent
from paramiko import ChannelFile
from paramiko.channel import ChannelStderrFile
from pyinfra import logger
from pyinfra.api.output import echo
from pyinfra.connectors import ssh, util
from pyinfra.connectors.util import OutputLine

from spark_deploy.config.printable import printable_output
from spark_deploy.inventory.login import reject_prompt
from spark_deploy.inventory.unreachable import raise_connect_error

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
    """Read a stream within the limits; replaces pyinfra's function of this name."""
    received_bytes, lines, printable_characters = 0, 0, _MAX_PRINTED_PER_STREAM
    stream = _binary_stream(io)
    while data := stream.readline(_LINE_BYTES):
        line = data if isinstance(data, bytes) else data.encode(errors="replace")
        received_bytes, lines = received_bytes + len(line), lines + 1
        if lines % _LINES_PER_TURN == 0:
            gevent.sleep(0)
        if received_bytes > MAX_BYTES or lines > _MAX_LINES:
            output_queue.put(OutputLine(name, "(the host printed more than the limit)"))
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


def patch_pyinfra() -> None:
    """Patch pyinfra to limit output, disable password prompts and explain failed connections."""
    util.read_buffer = read_buffer
    setattr(util, "getpass", reject_prompt)  # noqa: B010 - a name that util does not export
    setattr(ssh, "raise_connect_error", raise_connect_error)  # noqa: B010 - likewise
    logger.addFilter(_is_relevant)
    # The raised error also contains the reason of a failed connection.
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
