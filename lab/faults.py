"""Things that can be broken on purpose, as a table: each with the way to make it well again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lab import guest, network, servers
from lab.errors import LabError
from lab.guest import Guest
from lab.hub.faults import HubFault, set_fault
from lab.paths import LabPaths
from lab.shell import run


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for."""

    paths: LabPaths
    name: str
    guest: Guest | None
    value: int
    match: str
    times: int

    def the_guest(self) -> Guest:
        """Return the guest the fault needs.

        Raises:
            LabError: none was named.
        """
        if self.guest is None:
            raise LabError(self.name, "needs a guest", f"lab break {self.name} lab-1")
        return self.guest


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; ``heal`` is ``None`` where it heals by itself or by `lab up`."""

    name: str
    summary: str
    break_it: Callable[[Request], None]
    heal: Callable[[Request], None] | None


def _server_down(server: str) -> tuple[Callable[[Request], None], Callable[[Request], None]]:
    return (
        lambda request: servers.stop(request.paths, server),
        lambda request: servers.start(request.paths, server),
    )


def _hub(
    mode: str, default: int = 0
) -> tuple[Callable[[Request], None], Callable[[Request], None]]:
    def break_it(request: Request) -> None:
        fault = HubFault(mode, request.match, request.value or default, request.times)
        set_fault(request.paths.run / "hub-fault.json", fault)

    return break_it, lambda request: set_fault(request.paths.run / "hub-fault.json", None)


def _fill_disk(request: Request) -> None:
    """Leave ``value`` bytes (16 MiB by default) of the guest's disk."""
    one = request.the_guest()
    leave = request.value or 16 << 20
    free = int(run(["stat", "-f", "-c", "%a", one.disk]))
    block = int(run(["stat", "-f", "-c", "%S", one.disk]))
    balloon_bytes = free * block - leave
    if balloon_bytes > 0:
        run(["fallocate", "-l", str(balloon_bytes), one.disk / "balloon"])


def _empty_disk(request: Request) -> None:
    (request.the_guest().disk / "balloon").unlink(missing_ok=True)


def _gpu(word: str) -> Callable[[Request], None]:
    def break_it(request: Request) -> None:
        script = f"mkdir -p /run/labstub && echo {word} > /run/labstub/nvidia-smi"
        run(guest.enter_argv(request.the_guest(), ["sh", "-c", script]))

    return break_it


def _gpu_well(request: Request) -> None:
    run(guest.enter_argv(request.the_guest(), ["rm", "-f", "/run/labstub/nvidia-smi"]))


def _reboot(request: Request) -> None:
    run(guest.enter_argv(request.the_guest(), ["systemctl", "reboot"]), check=False)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill-guest", "power cut: SIGKILL to everything in it; `lab up NAME` boots it again",
              lambda request: guest.power_cut(request.the_guest()), None),
        Fault("power-cut", "kill-guest, and what no program had synced is lost from its disks",
              lambda request: guest.lose_unsynced(request.the_guest()), None),
        Fault("reboot", "orderly reboot from inside", _reboot, None),
        Fault("host-down", "network cable unplugged",
              lambda request: network.set_cable(request.the_guest().name, plugged=False),
              lambda request: network.set_cable(request.the_guest().name, plugged=True)),
        Fault("disk-full", "all but --value bytes (16 MiB) of the disk taken",
              _fill_disk, _empty_disk),
        Fault("no-driver", "nvidia-smi cannot reach the driver", _gpu("no-driver"), _gpu_well),
        Fault("driver-mismatch", "driver and library versions differ", _gpu("mismatch"), _gpu_well),
        Fault("packages-down", "package repositories refuse connections",
              *_server_down("packages")),
        Fault("registry-down", "image registry refuses connections", *_server_down("registry")),
        Fault("hub-down", "model hub refuses connections", *_server_down("hub")),
        Fault("hub-status", "hub answers --value (503), or 429, with Retry-After",
              *_hub("status", 503)),
        Fault("hub-wrong-hash", "one byte of each file is wrong", *_hub("wrong-hash")),
        Fault("hub-truncate", "connection cut at half of the body", *_hub("truncate")),
        Fault("hub-stall", "silence after half of the body", *_hub("stall")),
        Fault("hub-slow", "--value bytes per second (100000)", *_hub("slow", 100_000)),
        Fault("hub-expire", "links to large files have already expired", *_hub("expire")),
        Fault("hub-no-range", "ranges are ignored, the whole file comes", *_hub("no-range")),
    )
}  # fmt: skip


def apply(
    paths: LabPaths, what: str, name: str | None, *, value: int, match: str, times: int, heal: bool
) -> None:
    """Break ``what``, or with ``heal`` make it well again.

    Raises:
        LabError: it has no healing of its own, or needs a guest that was not named.
    """
    fault = FAULTS[what]
    request = Request(paths, what, Guest(paths, name) if name else None, value, match, times)
    if not heal:
        fault.break_it(request)
    elif fault.heal is not None:
        fault.heal(request)
    else:
        raise LabError(what, "does not heal by a switch", "run `lab up NAME`")


def active(paths: LabPaths) -> list[str]:
    found = []
    switch = paths.run / "hub-fault.json"
    if switch.exists():
        found.append(f"hub: {switch.read_text()}")
    found += [f"disk-full {p.parent.parent.name}" for p in paths.guests.glob("*/disk/balloon")]
    return found
