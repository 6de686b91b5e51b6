"""Other hosts as the first source: proven like the hub, left when they stand still.

A peer that does not have a file yet may be fetching it: it is waited for as long as it gets on,
so that the bytes cross the line to the hub once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from spark_contract.errors import HostToolError
from spark_contract.fetching import FetchPlan, Wire, of_tree
from spark_contract.job import read_progress

from spark_checkpoint.errors import GateRefused, TransferFailed
from spark_checkpoint.progress import note
from spark_checkpoint.sources.pacing import cancelled
from spark_checkpoint.sources.transport import Transport

_REST_S = 300.0  # a peer that was left is asked again
_POLL_S = 1.0
_TIMEOUT_S = 10.0
_PROGRESS_BYTES = 4096

Take = Callable[[Transport, str], None]


@dataclass(slots=True)
class _Peer:
    """One host that may have files of the tree."""

    url: str
    moved_at: float  # when it was last seen to get on
    told: tuple[str | None, int | None] | None = None
    left_until: float = 0.0
    why: str = "stands still"


class Peers:
    """The peers of one order; its methods may be called from several threads."""

    def __init__(self, plan: FetchPlan, stop: threading.Event):
        self._plan, self._stop = plan, stop
        self._patience_s = plan.peers.patience_s if plan.peers else 0.0
        self._lock = threading.Lock()
        urls = plan.peers.urls if plan.peers else ()
        now = time.monotonic()
        self._peers = [_Peer(of_tree(url, plan.digest), now) for url in urls]

    def bring(self, path: str, take: Take) -> bool:
        """Have a peer's file taken; return False when none has it or is about to.

        Args:
            path: of the file in the tree.
            take: reads and proves the file at an address; what it left is gone on from.
        """
        while asked := self._asked():
            transport = self._transport()
            if transport is None:
                return False
            for peer in asked:
                if self._took(peer, path, take, transport):
                    return True
            if not any([self._gets_on(peer, transport) for peer in asked]):
                return False
            if self._stop.wait(_POLL_S):
                raise cancelled(path)
        return False

    def _asked(self) -> list[_Peer]:
        return [peer for peer in self._peers if peer.left_until <= time.monotonic()]

    def _transport(self) -> Transport | None:
        """Return a client with the key of now: another deploy may have made a new one."""
        if self._plan.peers is None:
            return None
        wire = Wire(
            tries=1,
            backoff_s=0.0,
            token_file=self._plan.peers.key_file,
            parallel=self._plan.parallel,
            timeout_s=_TIMEOUT_S,
        )
        try:
            return Transport(wire, self._plan.peers.urls, direct=True, stop=self._stop)
        except HostToolError as error:
            note(f"peers are not asked: {error}")
            return None

    def _took(self, peer: _Peer, path: str, take: Take, transport: Transport) -> bool:
        url = f"{peer.url}/files/{quote(path)}"
        try:
            if not transport.has(url):
                return False
            take(transport, url)
        except GateRefused as error:
            note(f"peer: {error}")
            peer.left_until = float("inf")
            return False
        except TransferFailed as error:
            if self._stop.is_set():
                raise
            note(f"peer: {error}")
            return False
        peer.moved_at = time.monotonic()
        return True

    def _gets_on(self, peer: _Peer, transport: Transport) -> bool:
        """Return whether to wait for a peer: its work on the tree went on a moment ago."""
        told = peer.told
        try:
            line = transport.read_whole(f"{peer.url}/progress", _PROGRESS_BYTES).decode()
            found = read_progress(line, None)
            told, peer.why = (found.phase, found.bytes), "stands still"
        except (GateRefused, TransferFailed, UnicodeDecodeError) as error:
            peer.why = str(error)
        with self._lock:
            now = time.monotonic()
            if told != peer.told:
                peer.told, peer.moved_at = told, now
            if now - peer.moved_at < self._patience_s or peer.left_until > now:
                return peer.left_until <= now
            note(f"peer: {peer.url}: left for {_REST_S:.0f} s: {peer.why}")
            peer.left_until = now + _REST_S
            return False
