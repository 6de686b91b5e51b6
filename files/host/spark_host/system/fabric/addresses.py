"""Give the ports between hosts their addresses: tried for a while, kept when confirmed.

The try lies in netplan's folder below /run, so neither a lost connection nor a power cut leaves a
host with a network that nobody can reach: the one ends the while, the other the file.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from spark_contract import documents, files
from spark_contract.errors import HostToolError
from spark_contract.fabric import (
    APPLY_UNIT,
    KEPT_NETPLAN,
    NETPLAN_FILE,
    NETPLAN_TRIAL,
    RETURN_UNIT,
    TRY_AGAIN,
    FabricPlan,
    FabricPort,
    FabricRecord,
)
from spark_contract.paths import RUN_DIR, STATE_DIR, Paths
from spark_contract.tool import FABRIC, HOST_TOOL

from spark_host.system import systemd
from spark_host.system.programs import finished

_APPLY_S = 30.0  # less than a command of the controller may take
_PAUSE_S = 0.5
_STILL_S = 2.0  # without a change, and whoever manages the network is done
# To apply a change netplan stops NetworkManager, which takes the addresses of all its interfaces;
# a lease is back a few seconds later.
_REGAIN_S = 10.0
_TRIED = f"{RUN_DIR}/fabric.json"
_KEPT = f"{STATE_DIR}/fabric/record.json"


def main(words: Sequence[str], paths: Paths) -> int:
    """``try`` (a plan on stdin), ``settled``, ``confirm`` or ``restore [--unconfirmed]``."""
    with _alone(paths):
        if words == ["try"]:
            _try(documents.parse(FabricPlan, sys.stdin.read()), paths)
        elif words == ["settled"]:
            _settled(paths)
        elif words == ["confirm"]:
            _confirm(paths)
        elif words in (["restore"], ["restore", "--unconfirmed"]):
            _restore(paths, unconfirmed=len(words) == 2)
        else:
            raise HostToolError(
                "fabric", f"{' '.join(words)!r} is no order", "try, settled, confirm or restore"
            )
    return 0


@contextmanager
def _alone(paths: Paths) -> Iterator[None]:
    """Let the end of a try and its confirmation come one after the other."""
    paths.run.mkdir(parents=True, exist_ok=True)
    # For root alone: whoever may read a file may hold its lock, and nothing would come back.
    lock = os.open(paths.run / "fabric.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _try(plan: FabricPlan, paths: Paths) -> None:
    """Put the file where no boot finds it, have the way back start by itself, then apply."""
    trial = paths.below(NETPLAN_TRIAL)
    if paths.below(NETPLAN_FILE).exists():
        fix = "take it back first: spark-deploy fabric --restore"
        raise HostToolError(NETPLAN_FILE, "another set-up of ours is in use", fix)
    if trial.exists():  # to replace it would leave its addresses without a way back
        raise HostToolError(NETPLAN_TRIAL, "another try is under way", TRY_AGAIN)
    # The way back of a try that has just ended may not have left systemd yet.
    finished(["systemctl", "stop", f"{RETURN_UNIT}.timer", f"{RETURN_UNIT}.service"], _APPLY_S)
    record = _record_of(plan)
    files.write_text(paths.below(_TRIED), documents.text_of(record), 0o600)
    files.write_text(trial, plan.netplan, 0o600)
    try:
        _must(["netplan", "generate"], "netplan refuses the file")
        _must(
            ["systemd-run", "--quiet", "--collect", f"--unit={RETURN_UNIT}",
             f"--on-active={plan.confirm_s}", "--timer-property=AccuracySec=1s",
             HOST_TOOL, FABRIC, "restore", "--unconfirmed"],
            "systemd does not take the way back",
        )  # fmt: skip
    except HostToolError:
        files.remove(trial)
        raise
    # Not in this process: whoever asked may lose the connection by it.
    _must(
        ["systemd-run", "--quiet", "--collect", "--no-block", f"--unit={APPLY_UNIT}",
         "netplan", "apply"],
        "systemd does not take the change",
    )  # fmt: skip


def _record_of(plan: FabricPlan) -> FabricRecord:
    """Note what the ports, and the way by which the host is reached, are before the try."""
    ours = {port.interface for port in plan.ports}
    return FabricRecord(
        plan.ports,
        {port.interface: int(_link(port)["mtu"]) for port in plan.ports},
        {name: found for name, found in _addresses().items() if found and name not in ours},
        _default_routes(),
    )


def _settled(paths: Paths) -> FabricRecord:
    """Wait until what is tried has been applied to its end; only then does a login prove anything.

    Raises:
        HostToolError: the try is over, or a port does not get what it is to have.
    """
    if not paths.below(NETPLAN_TRIAL).exists():
        raise HostToolError("fabric", "the time was over: what was before is back",
                            "raise fabric.confirm_s, and run it again")  # fmt: skip
    record = files.load(FabricRecord, paths.below(_TRIED), "no record of the try")
    _wait_for(record)
    return record


def _confirm(paths: Paths) -> None:
    """Keep what is being tried, once it is there; a second time this does nothing."""
    trial, kept = paths.below(NETPLAN_TRIAL), paths.below(NETPLAN_FILE)
    if not trial.exists() and kept.exists():
        return
    record = _settled(paths)
    files.write_text(paths.below(_KEPT), documents.text_of(record), 0o600)
    files.write_text(kept, trial.read_text(), 0o600)
    files.remove(trial)
    finished(["systemctl", "stop", f"{RETURN_UNIT}.timer"], _APPLY_S)


def _restore(paths: Paths, *, unconfirmed: bool) -> None:
    """Have the ports as they were before us; with ``unconfirmed`` only what nobody confirmed."""
    trial, kept = paths.below(NETPLAN_TRIAL), paths.below(NETPLAN_FILE)
    if not trial.exists() and (unconfirmed or not kept.exists()):
        return
    tried = paths.below(_TRIED if trial.exists() else _KEPT)
    record = files.load(FabricRecord, tried, "nothing was set up by us") if tried.exists() else None
    if kept.exists() and not unconfirmed:
        files.write_text(paths.below(KEPT_NETPLAN), kept.read_text(), 0o600)
        files.remove(kept)
    files.remove(trial)
    try:
        _must(["netplan", "apply"], "netplan refuses what was before")
    finally:  # the way in comes back also where netplan fails
        _take_from_ports(record)
        if record and unconfirmed:
            _bring_back(record)
    files.remove(tried)
    if not unconfirmed:
        finished(["systemctl", "stop", f"{RETURN_UNIT}.timer"], _APPLY_S)


def _take_from_ports(record: FabricRecord | None) -> None:
    """Remove what networkd leaves on an interface that netplan no longer names."""
    for port in record.ports if record else ():
        finished(["ip", "address", "delete", port.address, "dev", port.interface], 10)
        before = str(record.mtu_before.get(port.interface, 1500)) if record else "1500"
        finished(["ip", "link", "set", port.interface, "mtu", before], 10)


def _bring_back(record: FabricRecord) -> None:
    """Have the way by which the host was reached again, whatever became of it.

    Seen with networkd 252: asked to apply addresses of some ports, it gave one of them to another
    interface, which lost its own, and crashed.
    """
    until = time.monotonic() + _REGAIN_S
    time.sleep(_PAUSE_S)  # who manages the network acts on its own after `netplan apply`
    while _lost(record, now := _addresses()) and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    ours = {port.address for port in record.ports}
    for name in record.addresses_before:
        for address in ours.intersection(now.get(name, ())):
            finished(["ip", "address", "delete", address, "dev", name], 10)
    for name, address in _lost(record, now):
        print(f"{name} had lost {address}", flush=True)
        finished(["ip", "address", "replace", address, "dev", name], 10)
    ways = {_version(route) for route in _default_routes()}
    for route in (one for one in record.routes_before if _version(one) not in ways):
        finished(["ip", _version(route), "route", "replace", *route.split()], 10)


def _lost(record: FabricRecord, now: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Return interfaces with addresses from before the try that have no successor (a new lease)."""
    ours = {port.address for port in record.ports}
    return [
        (name, address)
        for name, before in record.addresses_before.items()
        for address in before
        if _version(address) not in {_version(one) for one in now.get(name, ()) if one not in ours}
    ]


def _version(text: str) -> str:
    """Return the version of an address or a route, as `ip` takes it."""
    return "-6" if ":" in text else "-4"


def _wait_for(record: FabricRecord) -> None:
    """Wait until netplan has ended, every port has its address and its MTU, and nothing moves.

    Whoever manages the network goes on by itself for a moment, with other interfaces as well. An
    address that one of those does not regain is left to the login that follows.

    Raises:
        HostToolError: that takes longer than netplan does.
    """
    began = time.monotonic()
    seen, since = None, 0.0
    while time.monotonic() < began + _APPLY_S:
        missing = [port for port in record.ports if not _is_set(port)]
        now = (missing, _applies(), _addresses(), _default_routes())
        if now != seen:
            seen, since = now, time.monotonic()
        regained = not _lost(record, now[2]) or time.monotonic() >= began + _REGAIN_S
        if regained and not (missing or now[1]) and time.monotonic() - since >= _STILL_S:
            return
        time.sleep(_PAUSE_S)
    look = f"look at `journalctl -u {APPLY_UNIT} -u systemd-networkd -u NetworkManager`"
    if seen and seen[0]:
        port = seen[0][0]
        what = f"{port.interface} does not get {port.address}, MTU {port.mtu}"
        raise HostToolError("fabric", what, look)
    if seen and seen[1]:  # a login now would prove the old network
        raise HostToolError("fabric", f"netplan has not ended within {_APPLY_S:.0f} s", look)
    raise HostToolError("fabric", f"addresses still change after {_APPLY_S:.0f} s", look)


def _applies() -> bool:
    """Whether netplan still applies the file."""
    state = systemd.state(f"{APPLY_UNIT}.service", "ActiveState").get("ActiveState")
    return state not in ("inactive", "failed", None)


def _addresses() -> dict[str, tuple[str, ...]]:
    """Return the addresses by which others reach this host, by interface."""
    shown = finished(["ip", "-j", "address", "show", "scope", "global"], 10)
    return {
        link["ifname"]: tuple(
            f"{one['local']}/{one['prefixlen']}"
            for one in link["addr_info"]
            if one and not one.get("temporary")
        )
        for link in json.loads(shown.stdout or "[]")
        if link  # what was not asked for is an empty object, address or interface
    }


def _default_routes() -> tuple[str, ...]:
    """Return them without those that a router advertises: it goes on doing so."""
    shown = [finished(["ip", version, "route", "show", "default"], 10) for version in ("-4", "-6")]
    lines = (line.strip() for one in shown for line in one.stdout.splitlines())
    return tuple(line for line in lines if line and " proto ra " not in f"{line} ")


def _is_set(port: FabricPort) -> bool:
    link = _link(port)
    addresses = {f"{one['local']}/{one['prefixlen']}" for one in link["addr_info"]}
    return port.address in addresses and link["mtu"] == port.mtu


def _link(port: FabricPort) -> dict[str, Any]:
    shown = finished(["ip", "-j", "address", "show", "dev", port.interface], 10)
    if shown.returncode != 0:
        fix = "look at `ip link`, and name the ports by fabric.interfaces"
        raise HostToolError(port.interface, "is no interface here", fix)
    found: list[dict[str, Any]] = json.loads(shown.stdout)
    return found[0]


def _must(argv: list[str], what: str) -> None:
    done = finished(argv, _APPLY_S)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise HostToolError("fabric", f"{what}: {said[-1] if said else done.returncode}",
                            f"try `{' '.join(argv[:2])}` on the host")  # fmt: skip
