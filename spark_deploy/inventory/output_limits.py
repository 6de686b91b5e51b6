"""Host output as bounded text that cannot control a terminal.

pyinfra stops at invalid UTF-8, keeps any amount in memory, and prints it raw with ``-v``.
"""

from __future__ import annotations

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
from spark_deploy.inventory.login import refuse_prompt
from spark_deploy.inventory.unreachable import raise_connect_error

MAX_BYTES = 128 << 20
"""Per stream of a command; receipts of 100 checkpoints need a tenth."""
_LINE_BYTES = 64 << 20  # receipts have no line breaks
_MAX_LINES = 200_000
_LINES_PER_TURN = 1_000  # after which other hosts get a turn
# Printed with -v; apt prints less.
_PRINTED_OF_A_LINE = 4_000
_PRINTED_OF_A_STREAM = 1 << 20


def read_buffer(
    name: str,
    io: Any,
    output_queue: Queue[OutputLine],
    print_output: bool = False,
    print_func: Callable[[str], str] | None = None,
) -> None:
    """Replaces pyinfra's function of this name."""
    size, count, left = 0, 0, _PRINTED_OF_A_STREAM
    stream = _in_bytes(io)
    while data := stream.readline(_LINE_BYTES):
        line = data if isinstance(data, bytes) else data.encode(errors="replace")
        size, count = size + len(line), count + 1
        if count % _LINES_PER_TURN == 0:
            gevent.sleep(0)
        if size > MAX_BYTES or count > _MAX_LINES:
            # Closing ends the command.
            output_queue.put(OutputLine(name, "(the host printed more than the limit)"))
            (io.channel if isinstance(io, ChannelFile) else io).close()
            return
        text = printable_output(line.decode(errors="replace"))
        output_queue.put(OutputLine(name, text))
        if print_output and left > 0:
            limit = min(_PRINTED_OF_A_LINE, left - 1)
            if len(text) >= limit:
                text = f"{text[:limit]} (the host printed more, which is not shown)"
            left -= len(text) + 1
            echo(print_func(text) if print_func else text, err=True)


def _in_bytes(io: Any) -> Any:
    """Return bytes: paramiko's text stream fails on invalid UTF-8."""
    if isinstance(io, ChannelStderrFile):
        return io.channel.makefile_stderr("rb")
    return io.channel.makefile("rb") if isinstance(io, ChannelFile) else io


def _is_news(record: logging.LogRecord) -> bool:
    """Drop pyinfra's warning about a known_hosts file that does not exist yet."""
    is_about_file = str(record.msg).startswith("Failed to load host keys")
    reasons = record.args if isinstance(record.args, tuple) else ()
    return not (is_about_file and isinstance(reasons[-1], FileNotFoundError))


def limit_output() -> None:
    """Install this module in pyinfra, disable prompts, and explain failed connections."""
    util.read_buffer = read_buffer
    setattr(util, "getpass", refuse_prompt)  # noqa: B010 - a name that util does not export
    setattr(ssh, "raise_connect_error", raise_connect_error)  # noqa: B010 - likewise
    logger.addFilter(_is_news)
    # A failed connection also raises the reason.
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
