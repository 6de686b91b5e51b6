"""Waiting for the other members of a cluster during a check."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from spark_contract.paths import Paths
from spark_contract.records import Finding
from spark_contract.release import Release
from spark_contract.tool import PHASE, WAITED

from spark_host.system import cluster as clusters
from spark_host.system.programs import Report

_PROGRESS_S = 5.0
_POLL_S = 0.5
_CONNECT_S = 3.0


@dataclass(slots=True)
class Membership:
    """Whether all members of a starting engine's cluster have joined."""

    release: Release
    paths: Paths
    began_s: float = field(default_factory=time.monotonic)
    complete: bool = False
    alone: bool = False
    """The other members never joined, so no weights were loaded."""

    def problem(self) -> str | None:
        """Return why the start cannot succeed; ``None`` while members may still join."""
        cluster = self.release.cluster
        missing = clusters.missing_names(self.release, self.paths)
        if cluster is None or not missing:
            self.complete = True
        elif self.complete:
            return f"{missing} left the cluster"
        elif time.monotonic() - self.began_s > cluster.join_s:
            self.alone = True
            return f"{missing} did not join within {cluster.join_s:.0f} s"
        return None


def wait_until_joined(membership: Membership, report: Report) -> Finding:
    """Wait until this worker's rank is connected to the head."""

    def poll(_: float) -> tuple[bool, str] | None:
        if problem := membership.problem():
            return False, problem
        return (True, "the rank has joined the head") if membership.complete else None

    return _wait("joined", "join", poll, report)


def wait_for_head(membership: Membership, report: Report) -> Finding:
    """Wait until the head has proven the release and serves it.

    The watchdog there then accepts connections; a head that fails rolls back and leaves.
    """
    release = membership.release
    limit_s = release.timeouts.start_s + 2 * release.check.timeout_s

    def poll(waited: float) -> tuple[bool, str] | None:
        if problem := membership.problem():
            return False, problem
        cluster = release.cluster
        if cluster is None or _accepts(cluster.head.address, cluster.proven_port):
            return True, "the head is proven and serves"
        if waited > limit_s:
            return False, f"the head was not proven within {limit_s:.0f} s"
        return None

    return _wait("head", "head", poll, report)


def _wait(
    name: str, phase: str, poll: Callable[[float], tuple[bool, str] | None], report: Report
) -> Finding:
    began = reported = time.monotonic()
    while True:
        waited = time.monotonic() - began
        if (result := poll(waited)) is not None:
            return Finding(name, *result, round(waited, 3))
        if time.monotonic() - reported >= _PROGRESS_S:
            reported = time.monotonic()
            report(f"{PHASE}{phase} {WAITED}{waited:.0f}")
        time.sleep(_POLL_S)


def _accepts(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _CONNECT_S).close()
    except OSError:
        return False
    return True
