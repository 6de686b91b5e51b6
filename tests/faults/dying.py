"""pyinfra as a user runs it, but watched: it writes down every operation, and can end at a point.

``python -m tests.faults.dying INVENTORY DEPLOY -y`` with

- ``SPARK_OPERATIONS``: a file for a line of JSON for each operation, with the seconds that each
  command took;
- ``SPARK_DIE_AT``: ``NUMBER MOMENT COMMAND DELAY_S HOW``, where it ends; in the place of the number
  may stand the operation's name, with ``_`` for blanks;
- ``SPARK_DIE_ANYWAY``: a file for what came of it. With it the run ends at that operation even if
  there is nothing to send any more, or the command was over sooner than its delay.

Nothing of the code under test knows of it: pyinfra's loop over operations is watched from around.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from pyinfra_cli.main import main  # patches the standard library for gevent: it comes first

import gevent  # isort: skip
import json  # isort: skip
from pyinfra.api import operations  # isort: skip

_run_host_op = operations._run_host_op


def _end(host: Any, how: str, delay_s: float) -> None:
    """End this run in so many seconds, from outside where it is a signal."""
    if how == "CUT":
        gevent.spawn_later(delay_s, _cut, host)
    elif delay_s:
        # Of a run that ended before, the number may be another program's by then.
        still = f'[ "$(cut -d" " -f4 /proc/$$/stat)" = {os.getpid()} ]'
        subprocess.Popen(["sh", "-c", f"sleep {delay_s:.3f}; {still} && kill -{how} {os.getpid()}"])
    else:
        os.kill(os.getpid(), signal.Signals[f"SIG{how}"])


def _cut(host: Any) -> None:
    """Lose the connection, as when a cable is pulled and put back."""
    transport = host.connector.client.get_transport()
    transport.sock.close()


def _came(what: str) -> None:
    if path := os.environ.get("SPARK_DIE_ANYWAY"):
        with open(path, "w", encoding="utf-8") as out:
            out.write(what)


class Watched:
    """One operation on one host: its commands, how long each took, and whether to end there."""

    def __init__(self, number: int, name: str, host: Any):
        self.number, self.name, self.host = number, name, host
        self.seconds: list[float] = []
        at = os.environ.get("SPARK_DIE_AT", "").split()
        self.at = at[1:] if at and at[0] in (str(number), name.replace(" ", "_")) else []
        self.how = self.at[3] if self.at else ""

    def here(self, moment: str, command: int) -> None:
        """End the run if this is the point."""
        if self.at and self.at[0] == moment and int(self.at[1]) in (command, -1):
            delay_s, self.at = float(self.at[2]), []
            _came(moment)
            _end(self.host, self.how, delay_s)

    def anyway(self) -> None:
        """End the run here if its point was at this operation."""
        if self.how and "SPARK_DIE_ANYWAY" in os.environ:
            _came("after" if self.seconds else "nothing to send")
            _end(self.host, self.how, 0.0)

    def commands(self, commands: Iterator[Any]) -> Iterator[Any]:
        """Hand the commands on."""
        self.here("looking", -1)
        for index, command in enumerate(commands):
            if index == 0:
                self.here("before", -1)
            self.here("during", index)
            began = time.monotonic()
            yield command
            self.seconds.append(round(time.monotonic() - began, 4))

    def write(self) -> None:
        """Add what was seen to the list, when it is wanted."""
        if path := os.environ.get("SPARK_OPERATIONS"):
            with open(path, "a", encoding="utf-8") as out:
                found = {"number": self.number, "name": self.name, "seconds": self.seconds}
                out.write(json.dumps(found) + "\n")


def _watched(state: Any, host: Any, op_hash: str) -> bool:
    number = state.get_op_order().index(op_hash)
    seen = Watched(number, ", ".join(state.get_op_meta(op_hash).names), host)
    operation = state.get_op_data_for_host(host, op_hash)
    whole = operation.command_generator
    operation.command_generator = lambda: seen.commands(whole())
    done = bool(_run_host_op(state, host, op_hash))
    if seen.seconds:
        seen.here("after", -1)
    seen.anyway()
    seen.write()
    return done


if __name__ == "__main__":
    operations._run_host_op = _watched
    sys.exit(main())
