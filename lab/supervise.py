"""The process beside each guest: boots it, boots it again when it reboots, ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from types import FrameType

from lab import cgroup
from lab.boot import REBOOT_STATUS, boot_argv
from lab.guest import Guest, supervising


def supervise(guest: Guest) -> int:
    """Keep the guest up until it powers off; return nspawn's last status.

    SIGTERM is passed on, which is nspawn's word for an orderly power off.
    """
    seat = cgroup.seat(guest.name, "watch")
    cgroup.create(seat)
    cgroup.enter(seat)
    command = boot_argv(guest, v2=cgroup.is_v2())
    stopping = False
    with supervising(guest):
        while True:
            started = time.strftime("%F %T")
            with guest.console.open("ab") as console:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=console, stderr=console
                )

            def pass_on(_signal: int, _frame: FrameType | None, child: int = process.pid) -> None:
                nonlocal stopping
                stopping = True
                subprocess.run(["kill", "-TERM", str(child)], check=False)

            signal.signal(signal.SIGTERM, pass_on)
            status = process.wait()
            print(f"{started} booted, {time.strftime('%F %T')} ended, status {status}", flush=True)
            if status != REBOOT_STATUS or stopping:
                return status


def main(guest: Guest) -> None:
    """Entry point of ``lab _supervise``."""
    sys.exit(supervise(guest))
