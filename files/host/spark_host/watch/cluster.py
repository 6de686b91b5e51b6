"""What the watch of a cluster's member knows of the others.

A rank that ends takes its connections along, which the kernel tells at once. A host that loses
its power or its cable takes nothing along; so each watch also connects to the others.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.release import Member, Release

from spark_host.records import boot
from spark_host.system import cluster
from spark_host.system.host import Host

_CONNECT_S = 3.0
# So many in a row, beside the time: a busy host may miss one.
_SILENT_LOOKS = 3
_SILENT_S = 10.0
_BACKLOG = 64


class Together:
    """Looks after the members of a cluster, apart from the rest of the watch: to connect may hang.

    Where a release serves alone there is nothing to look at.
    """

    def __init__(self, release: Release, paths: Paths):
        self._release, self._paths = release, paths
        # The unit passed its check before systemd started the watch: all had joined by then, and
        # who is gone at the first look has left. A worker would else compute for nobody, for good.
        self._complete = True
        self._silent: dict[str, list[float]] = {}
        self._reached: set[str] = set()
        self._listener: socket.socket | None = None
        self.lost: str | None = None
        """Why the engine cannot go on; ``None`` while all members are there."""

    def begin(self, over: threading.Event) -> None:
        """Look until the event, in a thread of its own."""
        if self._release.cluster is not None:
            threading.Thread(target=self._look, args=(over,), daemon=True).start()

    def forget(self) -> None:
        """Begin anew, after the engine was ended for it."""
        self._complete, self.lost = False, None
        self._silent.clear()

    def _look(self, over: threading.Event) -> None:
        while not over.is_set():
            try:
                self._show_that_it_serves()
                self.lost = self.lost or self._left() or self._silent_one()
            except HostToolError as error:  # its own address is gone, as with a cable
                self.lost = str(error)
            over.wait(min(self._release.watch.interval_s, _SILENT_S / _SILENT_LOOKS))

    def _left(self) -> str | None:
        away = cluster.missing_members(self._release, self._paths)
        self._complete = self._complete or not away
        return f"{_named(away)} left the cluster" if away and self._complete else None

    def _silent_one(self) -> str | None:
        """Return which member does not answer any more, though it did before."""
        others = [one for one in self._members() if not self._is_own(one)]
        for one in others:
            now = time.monotonic()
            if self._answers(one):
                self._reached.add(one.host)
                self._silent.pop(one.host, None)
            elif one.host in self._reached:
                looks = self._silent.setdefault(one.host, [])
                looks.append(now)
                if len(looks) >= _SILENT_LOOKS and now - looks[0] >= _SILENT_S:
                    return f"{one.host} gave no answer on the fabric for {now - looks[0]:.0f} s"
        return None

    def _answers(self, one: Member) -> bool:
        """Whether the host is there; one that refuses is."""
        try:
            socket.create_connection((one.address, self._port()), _CONNECT_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True

    def _show_that_it_serves(self) -> None:
        """Let others connect while this release is the one that boots here: that is, proven."""
        serves = boot.opens_at_start(self._release, Host(self._paths))
        if serves and self._listener is None:
            own = next(one for one in self._members() if self._is_own(one))
            with contextlib.suppress(OSError):  # tried again at the next look
                self._listener = socket.create_server(
                    (own.address, self._port()), backlog=_BACKLOG, reuse_port=False
                )
                self._listener.setblocking(False)
        elif not serves and self._listener is not None:
            self._listener.close()
            self._listener = None
        while self._listener is not None:
            try:
                self._listener.accept()[0].close()
            except OSError:
                return

    def _members(self) -> tuple[Member, ...]:
        return self._release.cluster.members if self._release.cluster else ()

    def _is_own(self, one: Member) -> bool:
        return one == cluster.own_member(self._release, self._paths)

    def _port(self) -> int:
        return self._release.cluster.proven_port if self._release.cluster else 0


def _named(away: list[Member]) -> str:
    return ", ".join(one.host for one in away)
