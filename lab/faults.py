"""Faults to inject into the lab, each with a method to remove it."""

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
    paths: LabPaths
    name: str
    guest: Guest | None
    value: int
    match: str
    times: int

    def require_guest(self) -> Guest:
        if self.guest is None:
            raise LabError(self.name, "needs a guest", f"lab break {self.name} lab-1")
        return self.guest


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    summary: str
    break_it: Callable[[Request], None]
    heal: Callable[[Request], None] | None  # None: `lab up` heals it, or it needs none


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
    target = request.require_guest()
    leave = request.value or 16 << 20
    free = int(run(["stat", "-f", "-c", "%a", target.disk]))
    block = int(run(["stat", "-f", "-c", "%S", target.disk]))
    balloon_bytes = free * block - leave
    if balloon_bytes > 0:
        run(["fallocate", "-l", str(balloon_bytes), target.disk / "balloon"])


def _empty_disk(request: Request) -> None:
    (request.require_guest().disk / "balloon").unlink(missing_ok=True)


def _gpu(word: str) -> Callable[[Request], None]:
    def break_it(request: Request) -> None:
        script = f"mkdir -p /run/labstub && echo {word} > /run/labstub/nvidia-smi"
        run(guest.enter_argv(request.require_guest(), ["sh", "-c", script]))

    return break_it


def _heal_gpu(request: Request) -> None:
    run(guest.enter_argv(request.require_guest(), ["rm", "-f", "/run/labstub/nvidia-smi"]))


def _reboot(request: Request) -> None:
    run(guest.enter_argv(request.require_guest(), ["systemctl", "reboot"]), check=False)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill-guest", "power cut: SIGKILL to all its processes; `lab up NAME` boots it",
              lambda request: guest.power_cut(request.require_guest()), None),
        Fault("power-cut", "kill-guest, and unsynced data is lost",
              lambda request: guest.lose_unsynced(request.require_guest()), None),
        Fault("reboot", "orderly reboot from inside", _reboot, None),
        Fault("host-down", "network cable unplugged",
              lambda request: network.set_cable(request.require_guest().name, plugged=False),
              lambda request: network.set_cable(request.require_guest().name, plugged=True)),
        Fault("disk-full", "only --value bytes (16 MiB) of the disk left",
              _fill_disk, _empty_disk),
        Fault("no-driver", "nvidia-smi cannot reach the driver", _gpu("no-driver"), _heal_gpu),
        Fault("driver-mismatch", "driver and library versions differ", _gpu("mismatch"), _heal_gpu),
        Fault("packages-down", "package repositories refuse connections",
              *_server_down("packages")),
        Fault("registry-down", "image registry refuses connections", *_server_down("registry")),
        Fault("hub-down", "model hub refuses connections", *_server_down("hub")),
        Fault("hub-status", "hub answers --value (503), or 429, with Retry-After",
              *_hub("status", 503)),
        Fault("hub-wrong-hash", "a wrong byte in each file", *_hub("wrong-hash")),
        Fault("hub-truncate", "connection cut at half of the body", *_hub("truncate")),
        Fault("hub-stall", "silence after half of the body", *_hub("stall")),
        Fault("hub-slow", "--value bytes per second (100000)", *_hub("slow", 100_000)),
        Fault("hub-expire", "links to large files have already expired", *_hub("expire")),
        Fault("hub-no-range", "ranges are ignored, the whole file is sent", *_hub("no-range")),
    )
}  # fmt: skip


def apply(
    paths: LabPaths, what: str, name: str | None, *, value: int, match: str, times: int, heal: bool
) -> None:
    fault = FAULTS[what]
    request = Request(paths, what, Guest(paths, name) if name else None, value, match, times)
    if not heal:
        fault.break_it(request)
    elif fault.heal is not None:
        fault.heal(request)
    else:
        raise LabError(what, "cannot be removed with --heal", "run `lab up NAME`")


def active(paths: LabPaths) -> list[str]:
    lines = []
    switch = paths.run / "hub-fault.json"
    if switch.exists():
        lines.append(f"hub: {switch.read_text()}")
    lines += [f"disk-full {p.parent.parent.name}" for p in paths.guests.glob("*/disk/balloon")]
    return lines
