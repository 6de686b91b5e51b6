"""Runs pyinfra, records each operation, and stops the run at a given point.

``python -m tests.faults.interrupted_run INVENTORY DEPLOY -y`` with

- ``SPARK_OPERATIONS``: file for one JSON line per operation, with the seconds of each command;
- ``SPARK_DIE_AT``: ``NUMBER MOMENT COMMAND DELAY_S HOW``; instead of the number, the operation's
  name with ``_`` for blanks;
- ``SPARK_DIE_ANYWAY``: file for the moment of the stop. With it the run stops at that operation
  even if it sends no command or the command finished before the delay.

Only pyinfra's operation loop is wrapped.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from pyinfra_cli.main import main

import gevent  # isort: skip
import json  # isort: skip
from pyinfra.api import operations  # isort: skip

_run_host_op = operations._run_host_op


def _end(host: Any, how: str, delay_s: float) -> None:
    if how == "CUT":
        gevent.spawn_later(delay_s, _cut_connection, host)
    elif delay_s:
        # The process id may belong to another program once the run is over.
        still = f'[ "$(cut -d" " -f4 /proc/$$/stat)" = {os.getpid()} ]'
        subprocess.Popen(["sh", "-c", f"sleep {delay_s:.3f}; {still} && kill -{how} {os.getpid()}"])
    else:
        os.kill(os.getpid(), signal.Signals[f"SIG{how}"])


def _cut_connection(host: Any) -> None:
    transport = host.connector.client.get_transport()
    transport.sock.close()


def _record_moment(moment: str) -> None:
    if path := os.environ.get("SPARK_DIE_ANYWAY"):
        with open(path, "w", encoding="utf-8") as out:
            out.write(moment)


class Watched:
    def __init__(self, number: int, name: str, host: Any):
        self.number, self.name, self.host = number, name, host
        self.seconds: list[float] = []
        point = os.environ.get("SPARK_DIE_AT", "").split()
        self.point = (
            point[1:] if point and point[0] in (str(number), name.replace(" ", "_")) else []
        )
        self.how = self.point[3] if self.point else ""

    def end_if(self, moment: str, command: int) -> None:
        if self.point and self.point[0] == moment and int(self.point[1]) in (command, -1):
            delay_s, self.point = float(self.point[2]), []
            _record_moment(moment)
            _end(self.host, self.how, delay_s)

    def end_anyway(self) -> None:
        if self.how and "SPARK_DIE_ANYWAY" in os.environ:
            _record_moment("after" if self.seconds else "nothing to send")
            _end(self.host, self.how, 0.0)

    def commands(self, commands: Iterator[Any]) -> Iterator[Any]:
        self.end_if("idle", -1)
        for index, command in enumerate(commands):
            if index == 0:
                self.end_if("before", -1)
            self.end_if("during", index)
            began = time.monotonic()
            yield command
            self.seconds.append(round(time.monotonic() - began, 4))

    def write(self) -> None:
        if path := os.environ.get("SPARK_OPERATIONS"):
            with open(path, "a", encoding="utf-8") as out:
                row = {"number": self.number, "name": self.name, "seconds": self.seconds}
                out.write(json.dumps(row) + "\n")


def _run_watched(state: Any, host: Any, op_hash: str) -> bool:
    number = state.get_op_order().index(op_hash)
    watched = Watched(number, ", ".join(state.get_op_meta(op_hash).names), host)
    operation = state.get_op_data_for_host(host, op_hash)
    generator = operation.command_generator
    operation.command_generator = lambda: watched.commands(generator())
    done = bool(_run_host_op(state, host, op_hash))
    if watched.seconds:
        watched.end_if("after", -1)
    watched.end_anyway()
    watched.write()
    return done


if __name__ == "__main__":
    operations._run_host_op = _run_watched
    sys.exit(main())
