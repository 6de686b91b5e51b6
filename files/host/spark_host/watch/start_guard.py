"""The start guard: kills a starting engine before the host runs out of memory.

A start allocates many GiB within seconds, so a thread measures the memory four times a second until
the release is proven. Loading fragments memory, so another thread drops caches and compacts memory.
"""

import threading
import time

from spark_contract.paths import Paths
from spark_contract.records import StartMemory
from spark_contract.release import FRAGMENTED, STARVING, Release

from spark_host.engine import container, logs
from spark_host.engine.memory import MemoryFloor, available_bytes, defragment, read_free_blocks
from spark_host.system.host import record_event
from spark_host.watch import watchdog

_SAMPLE_INTERVAL_S = 0.25
_EVENT_WAIT_S = 2.0
_BLOCKS_INTERVAL_S = 1.0
_DEFRAGMENT_REST_S = 10.0  # between two rounds, because each takes seconds
_LONGEST_REST_S = 40.0  # after rounds that did not help
_FIX = (
    "lower engine.memory_fraction, set engine.kv_cache_gib, "
    "or stop other programs that use memory on this host"
)


class StartGuard:
    """A context manager that kills the engine if the available memory falls below the floor."""

    def __init__(self, release: Release, paths: Paths):
        self._release, self._paths = release, paths
        self._floor = MemoryFloor(release.memory.floor_bytes)
        self._stop, self._event_written, self._sampled = (threading.Event() for _ in range(3))
        self._began = time.monotonic()
        self._lowest_after_s = 0.0
        self._pidfd: int | None = None
        self.kill_reason: str | None = None
        """Why the engine was killed; ``None`` while there is enough memory."""
        blocks = read_free_blocks()
        # The caller has just compacted memory; remember whether it is still fragmented.
        self._fragmented = blocks if blocks is not None and blocks.is_fragmented else None

    def __enter__(self) -> "StartGuard":
        for work in (self._sample, self._open_process, self._keep_blocks_free):
            threading.Thread(target=work, daemon=True).start()
        self._sampled.wait(_EVENT_WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self.kill_reason is not None:  # the process may exit before the event is written
            self._event_written.wait(_EVENT_WAIT_S)

    @property
    def start_memory(self) -> StartMemory | None:
        """The lowest available memory and when it occurred; ``None`` before the first sample."""
        lowest = self._floor.lowest_bytes
        if lowest is None:
            return None
        return StartMemory(lowest, round(self._lowest_after_s, 1), self._floor.bytes)

    def read_driver_failures(self, *, ready: bool) -> tuple[str, bool]:
        """Describe the GPU driver's memory problems, and return whether the start has failed.

        It has failed if at least two of these apply: the kernel log contains failed allocations,
        memory was fragmented, the engine is not ready.
        """
        failures = logs.count_kernel_faults(time.monotonic() - self._began)[logs.NO_MEMORY]
        problems = []
        if failures:
            problems.append(
                f"the GPU driver failed to allocate memory {failures} times during startup "
                "(NV_ERR_NO_MEMORY in the kernel log)"
            )
        if self._fragmented is not None:
            problems.append(f"memory was fragmented at startup: {self._fragmented}")
        return "; ".join(problems), len(problems) + (not ready) >= 2

    def _sample(self) -> None:
        while not self._stop.is_set():
            previous_lowest = self._floor.lowest_bytes
            reason = self._floor.check(available_bytes())
            if self._floor.lowest_bytes != previous_lowest:
                self._lowest_after_s = time.monotonic() - self._began
            self._sampled.set()
            if reason is not None:
                self._kill(reason)
                return
            self._stop.wait(_SAMPLE_INTERVAL_S)

    def _keep_blocks_free(self) -> None:
        rest_s = _DEFRAGMENT_REST_S
        while not self._stop.wait(_BLOCKS_INTERVAL_S):
            if not self._lacks_free_blocks():
                continue
            if problem := defragment():
                record_event(self._release, FRAGMENTED, problem, self._paths)
                return
            helped = not self._lacks_free_blocks()
            rest_s = _DEFRAGMENT_REST_S if helped else min(2 * rest_s, _LONGEST_REST_S)
            self._stop.wait(rest_s - _BLOCKS_INTERVAL_S)

    def _lacks_free_blocks(self) -> bool:
        blocks = read_free_blocks()
        return blocks is not None and blocks.is_low(self._release.memory.needed_bytes)

    def _open_process(self) -> None:
        while self._pidfd is None and not self._stop.is_set():
            self._pidfd = container.open_process(self._release.container)
            self._stop.wait(_SAMPLE_INTERVAL_S)

    def _kill(self, reason: str) -> None:
        event = f"{reason}; the engine was killed during startup"
        # Set the reason first: the check reads it as soon as the engine has exited.
        self.kill_reason = f"{event}; fix: {_FIX}"
        # Kill before writing the event, which could block while memory is short.
        problem = container.kill_container(self._release.container, self._pidfd)
        watchdog.record_soon(self._release, STARVING, event, self._paths)
        self._event_written.set()
        watchdog.ensure_unit_stops(problem, self._release, self._paths)
