"""How the output of hosts comes in through pyinfra: as text, bounded, and harmless for a terminal.

pyinfra takes every line as it is: it ends the reading of a host at the first byte that is no UTF-8,
keeps whatever amount a host sends in memory, and with ``-v`` prints all of it to the operator's
terminal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

from paramiko import ChannelFile
from paramiko.channel import ChannelStderrFile
from pyinfra.api.output import echo
from pyinfra.connectors import util
from pyinfra.connectors.util import OutputLine

from spark_deploy.config.printable import heard
from spark_deploy.inventory.login import refuse_prompt

MOST_BYTES = 128 << 20
"""Of one stream of one command; receipts of a hundred trees are a tenth of it."""
_LINE_BYTES = 64 << 20  # the receipt of a large tree is one line
# What is printed of it with -v; more than apt says of an installation.
_SHOWN_OF_A_LINE = 4_000
_SHOWN_OF_A_STREAM = 1 << 20


def read_buffer(
    name: str,
    io: Any,
    output_queue: Queue[OutputLine],
    print_output: bool = False,
    print_func: Callable[[str], str] | None = None,
) -> None:
    """Read what a command prints, in the place of pyinfra's function of this name."""
    taken, left = 0, _SHOWN_OF_A_STREAM
    for line in _lines(_in_bytes(io)):
        taken += len(line)
        if taken > MOST_BYTES:
            # Nobody reads on, so the command ends; without its end no answer of ours is taken.
            output_queue.put(OutputLine(name, "(the host printed more than anybody asked for)"))
            _close(io)
            return
        text = heard(line.decode(errors="replace"))
        output_queue.put(OutputLine(name, text))
        if print_output and left > 0:
            said = _bounded(text, left)
            left -= len(said) + 1
            echo(print_func(said) if print_func else said, err=True)


def _bounded(text: str, left: int) -> str:
    """Return what a terminal is shown of a line, and of the last one that it is shown."""
    most = min(_SHOWN_OF_A_LINE, left - 1)
    if len(text) < most:
        return text
    return f"{text[:most]} (the host printed more, which is not shown)"


def _in_bytes(io: Any) -> Any:
    """Return the stream as bytes: paramiko's raises an error of its own at bytes that are none."""
    if isinstance(io, ChannelStderrFile):
        return io.channel.makefile_stderr("rb")
    return io.channel.makefile("rb") if isinstance(io, ChannelFile) else io


def _lines(io: Any) -> Iterator[bytes]:
    while line := io.readline(_LINE_BYTES):
        yield line if isinstance(line, bytes) else line.encode(errors="replace")


def _close(io: Any) -> None:
    if isinstance(io, ChannelFile):
        io.channel.close()
    else:
        io.close()


def listen_carefully() -> None:
    """Have all output of hosts come in through here, and pyinfra never prompt, from now on."""
    util.read_buffer = read_buffer
    setattr(util, "getpass", refuse_prompt)  # noqa: B010 - a name that util does not export
    # Why a connection failed is raised as well, and said in one line.
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
