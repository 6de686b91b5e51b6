"""The part of a check that is about the other members of a cluster."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field

from spark_contract.paths import Paths
from spark_contract.records import Finding
from spark_contract.release import Release
from spark_contract.tool import PHASE, WAITED

from spark_host.system import members
from spark_host.system.programs import Report

_PROGRESS_S = 5.0
_LOOK_S = 0.5
_CONNECT_S = 3.0


@dataclass(slots=True)
class Joining:
    """Says what is wrong with the cluster of an engine that starts."""

    release: Release
    paths: Paths
    began_s: float = field(default_factory=time.monotonic)
    complete: bool = False
    alone: bool = False
    """The others never came, so no weights were loaded."""

    def problem(self) -> str | None:
        """Return why the start is in vain; ``None`` while the others may still come."""
        cluster = self.release.cluster
        away = ", ".join(one.host for one in members.missing(self.release, self.paths))
        if cluster is None or not away:
            self.complete = True
        elif self.complete:
            return f"{away} left the cluster"
        elif time.monotonic() - self.began_s > cluster.join_s:
            self.alone = True
            return f"{away} did not join within {cluster.join_s:.0f} s"
        return None


def joined(joining: Joining, report: Report) -> Finding:
    """Wait until the rank of this worker is connected with its head: all that it can show."""
    began = told = time.monotonic()
    while True:
        problem, waited = joining.problem(), time.monotonic() - began
        if problem or joining.complete:
            text = problem or "the rank has joined its head"
            return Finding("joined", problem is None, text, round(waited, 3))
        if time.monotonic() - told >= _PROGRESS_S:
            told = time.monotonic()
            report(f"{PHASE}join {WAITED}{waited:.0f}")
        time.sleep(_LOOK_S)


def head_proven(joining: Joining, report: Report) -> Finding:
    """Wait until the head has proven the release of both and serves it from now on.

    Its watch then lets itself be connected to; a head that fails goes back, and leaves.
    """
    release = joining.release
    began = told = time.monotonic()
    limit_s = release.timeouts.start_s + 2 * release.check.timeout_s
    while True:
        waited = time.monotonic() - began
        if (problem := joining.problem()) is not None:
            return Finding("head", False, problem, round(waited, 3))
        if release.cluster is None or _connects(
            release.cluster.head.address, release.cluster.proven_port
        ):
            return Finding("head", True, "the head is proven and serves", round(waited, 3))
        if waited > limit_s:
            text = f"the head was not proven within {limit_s:.0f} s"
            return Finding("head", False, text, round(waited, 3))
        if time.monotonic() - told >= _PROGRESS_S:
            told = time.monotonic()
            report(f"{PHASE}head {WAITED}{waited:.0f}")
        time.sleep(_LOOK_S)


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _CONNECT_S).close()
    except OSError:
        return False
    return True
