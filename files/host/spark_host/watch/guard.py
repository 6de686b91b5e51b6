"""The guard of an engine's start: while weights load, hosts die.

Loading, profiling, graph capture and warm-up each allocate many GiB within seconds, and a host that
runs out of them answers nobody any more. So the memory is looked at four times a second from the
start of the container until its release is proven, by threads of their own: neither docker, nor a
disk, nor an engine that is asked a question may hold up a look. Reading the checkpoint fills the
page cache and breaks up free memory; another thread drops caches and compacts memory meanwhile.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from spark_contract.paths import Paths
from spark_contract.records import StartMemory
from spark_contract.release import FRAGMENTED, STARVING, Release

from spark_host.engine import container, logs
from spark_host.engine.memory import Floor, available_bytes, defragment, read_free_blocks
from spark_host.watch import loop

_EVERY_S = 0.25
_NOTE_S = 2.0
_BLOCKS_EVERY_S = 1.0
_DEFRAGMENT_REST_S = 10.0  # between two rounds, each of which takes seconds
_LONGEST_REST_S = 40.0  # after rounds that did not help
_FIX = (
    "lower engine.memory_fraction (or pin engine.kv_cache_gib), "
    "or stop what else holds memory on this host"
)


class StartGuard:
    """Keeps the floor of the host's memory during a block; ends the engine below it."""

    def __init__(self, release: Release, paths: Paths):
        self._release, self._paths = release, paths
        self._floor = Floor(release.memory.floor_bytes)
        self._over, self._told = threading.Event(), threading.Event()
        self._looked = threading.Event()
        self._began = time.monotonic()
        self._lowest_after_s = 0.0
        self._held: int | None = None
        self.starved: str | None = None
        """Why the engine was ended; ``None`` while there is memory enough."""
        blocks = read_free_blocks()
        # After the compaction that precedes a launch.
        self._fragmented = blocks if blocks is not None and blocks.is_fragmented else None

    def __enter__(self) -> StartGuard:
        for work in (self._look, self._hold, self._keep_blocks_free):
            threading.Thread(target=work, daemon=True).start()
        # A block that ends at once, as the check of a worker whose head is there, has one look.
        self._looked.wait(_NOTE_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self.starved is not None:  # this process may end now
            self._told.wait(_NOTE_S)

    @property
    def seen(self) -> StartMemory | None:
        """The least memory that was available, and when; ``None`` before the first look."""
        lowest = self._floor.lowest_bytes
        if lowest is None:
            return None
        return StartMemory(lowest, round(self._lowest_after_s, 1), self._floor.bytes)

    def read_driver_failures(self, *, ready: bool) -> tuple[str, bool]:
        """Describe failed allocations of the GPU driver; whether they fail the start.

        Healthy starts log such lines, too: the driver tries again with smaller blocks. So two
        things of three have to come together: a line, a fragmented host, an engine not ready.
        """
        lines = logs.count_kernel_faults(time.monotonic() - self._began)[logs.NO_MEMORY]
        texts = []
        if lines:
            texts.append(
                f"the GPU driver failed to allocate memory {lines} times while the engine started "
                "(NV_ERR_NO_MEMORY in the kernel log)"
            )
        if self._fragmented is not None:
            texts.append(f"memory was fragmented at the launch: {self._fragmented}")
        return "; ".join(texts), bool(texts) and (not ready or len(texts) == 2)

    def _look(self) -> None:
        while not self._over.is_set():
            before = self._floor.lowest_bytes
            reason = self._floor.broken(available_bytes())
            if self._floor.lowest_bytes != before:
                self._lowest_after_s = time.monotonic() - self._began
            self._looked.set()
            if reason is not None:
                self._end(reason)
                return
            self._over.wait(_EVERY_S)

    def _keep_blocks_free(self) -> None:
        wait_s, rest_s = _BLOCKS_EVERY_S, _DEFRAGMENT_REST_S
        while not self._over.wait(wait_s):
            wait_s = _BLOCKS_EVERY_S
            if not self._is_low():
                continue
            if problem := defragment():
                loop.event(self._release, FRAGMENTED, problem, self._paths)
                return
            # A round that does not help costs the loading engine a core and its disk.
            rest_s = min(2 * rest_s, _LONGEST_REST_S) if self._is_low() else _DEFRAGMENT_REST_S
            wait_s = rest_s

    def _is_low(self) -> bool:
        blocks = read_free_blocks()
        return blocks is not None and blocks.is_low(self._release.memory.needed_bytes)

    def _hold(self) -> None:
        """Get hold of the container's first process, once docker has made it."""
        while self._held is None and not self._over.is_set():
            self._held = container.open_process(self._release.container)
            self._over.wait(_EVERY_S)

    def _end(self, reason: str) -> None:
        stopped = f"{reason} (memory.floor_gib): the engine was stopped while it started"
        # Before anything is written: at the speed at which weights load a disk is too slow.
        problem = container.kill_container(self._release.container, self._held)
        self.starved = f"{stopped}; fix: {_FIX}"
        loop.event(self._release, STARVING, stopped, self._paths)
        self._told.set()
        loop.kill_unit_after(problem, self._release, self._paths)
