"""One engine starts at a time, where a host has several services.

While an engine loads it measures what memory is free and takes its share of it; another one that
loads beside it would falsify that.
"""

from __future__ import annotations

import fcntl
import os

from spark_contract.host.sentences import PHASE
from spark_contract.host.units import SERVE
from spark_contract.serving.release import Release

from spark_host.system.log import Report
from spark_host.system.ports import Host


def take_turn(release: Release, host: Host, report: Report) -> None:
    """Return once no other engine is starting, and have others wait for this one.

    Whose turn it is ends with its start, however that ends: systemd is asked, so nothing is left
    to clean up. After the time that a start may take at most, this one goes on beside the other.
    """
    deadline = host.clock.monotonic() + release.timeouts.start_s
    while (other := _starting(release, host)) is not None:
        if host.clock.monotonic() > deadline:
            report(f"{PHASE}turn does not wait any longer for the start of {other}")
            return
        report(f"{PHASE}turn waiting for the start of {other}")
        host.clock.sleep(2)


def _starting(release: Release, host: Host) -> str | None:
    """Return the release whose turn it is; without one it is this release's from now on."""
    descriptor = os.open(host.paths.run / "starting", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        other = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        if other and other != release.name and _is_activating(other, host):
            return other
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{release.name}\n".encode(), 0)
        return None
    finally:
        os.close(descriptor)


def _is_activating(name: str, host: Host) -> bool:
    unit = SERVE.of(name)
    state = host.units.show([unit], ["ActiveState", "SubState"]).get(unit, {})
    # Between two starts systemd says activating as well, for a minute in which nothing is loaded.
    return state.get("ActiveState") == "activating" and state.get("SubState") != "auto-restart"
