"""Faults to inject into a guest, each with a method to remove it."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from lab import guest as guests
from lab import network
from lab.guest import Guest
from lab.shell import run


@dataclass(frozen=True, slots=True)
class Fault:
    summary: str
    inject: Callable[[Guest, int], None]  # the number is --value
    heal: Callable[[Guest], None] | None = None  # None: `lab up` heals it, or it needs none


def _fill_disk(guest: Guest, left_bytes: int) -> None:
    disk = os.statvfs(guest.disk)
    balloon_bytes = disk.f_bavail * disk.f_frsize - (left_bytes or 16 << 20)
    if balloon_bytes > 0:
        run(["fallocate", "-l", str(balloon_bytes), guest.disk / "balloon"])


def _break_driver(answer: str) -> Callable[[Guest, int], None]:
    script = f"mkdir -p /run/labstub && echo {answer} > /run/labstub/nvidia-smi"
    return lambda guest, _: _run_script(guest, script)


def _heal_driver(guest: Guest) -> None:
    _run_script(guest, "rm -f /run/labstub/nvidia-smi")


def _run_script(guest: Guest, script: str, *, check: bool = True) -> None:
    run(guests.enter_argv(guest, ["sh", "-c", script]), check=check)


FAULTS = {
    "kill-guest": Fault("power cut: SIGKILL to all processes of the guest; `lab up NAME` boots it",
                        lambda guest, _: guests.power_cut(guest)),
    "power-cut": Fault("like kill-guest, but unsynced data is lost",
                       lambda guest, _: guests.cut_power_without_sync(guest)),
    "reboot": Fault("orderly reboot from inside",
                    lambda guest, _: _run_script(guest, "systemctl reboot", check=False)),
    "host-down": Fault("the network cable is unplugged",
                       lambda guest, _: network.set_cable(guest.name, plugged=False),
                       lambda guest: network.set_cable(guest.name, plugged=True)),
    "disk-full": Fault("only --value bytes (by default 16 MiB) of the disk are free", _fill_disk,
                       lambda guest: (guest.disk / "balloon").unlink(missing_ok=True)),
    "no-driver": Fault("nvidia-smi cannot reach the driver",
                       _break_driver("no-driver"), _heal_driver),
    "driver-mismatch": Fault("driver and library versions differ",
                             _break_driver("mismatch"), _heal_driver),
}  # fmt: skip
