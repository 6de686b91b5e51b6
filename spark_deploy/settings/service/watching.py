"""Settings of what is held against a serving engine: memory, watch, proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spark_deploy.documents.declare import GIB, Gib, in_gib, setting
from spark_deploy.settings.rules import Broken


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The one memory pool that CPU and GPU share."""

    total_bytes: Gib = setting(
        round(119.7 * GIB),
        "What MemTotal of the host shows, never the number on the box: 119.7 on a 128 GB Spark; "
        "newer units show 121.7.",
        key="total_gib",
        exclusiveMinimum=0,
    )
    reserve_bytes: Gib = setting(
        12 * GIB,
        "Left to the system and to other workloads; raise it for them.",
        key="reserve_gib",
        minimum=0,
    )
    start_wait_s: int = setting(
        300,
        "Seconds to wait before a start for memory that a stopped engine gives back late.",
        minimum=0,
    )
    floor_bytes: Gib = setting(
        4 * GIB,
        "Less available memory than this, while the engine starts or serves, and it is stopped "
        "before the host dies.",
        key="floor_gib",
        minimum=0,
    )

    def broken(self) -> Iterator[Broken]:
        """Yield what does not add up."""
        reserve, total, floor = map(
            in_gib, (self.reserve_bytes, self.total_bytes, self.floor_bytes)
        )
        if reserve >= total:
            what = f"reserve_gib {reserve} leaves nothing of {total} GiB"
            yield Broken(("reserve_gib",), what, "lower it below memory.total_gib")
        if floor > reserve:
            what = f"the watch would stop every engine: floor {floor} GiB is above the"
            fix = "keep floor_gib at or below memory.reserve_gib"
            yield Broken(("floor_gib",), f"{what} reserve {reserve} GiB", fix)


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """When a serving engine is restarted."""

    stall_s: int = setting(
        120,
        "Seconds with running requests and no progress, or without any answer, before a restart; "
        "never less than a second per 1000 tokens of context, because a long prompt is counted "
        "only when all of it was read.",
        minimum=5,
    )
    interval_s: int = setting(10, "Seconds between two looks.", minimum=1)
    hot_celsius: int = setting(
        90,
        "Temperature of the GPU from which on the watch writes an event; it stops nothing for it. "
        "Boards switch themselves off without a word near 105.",
        minimum=40,
        maximum=110,
    )


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """The proof after every start, and the measurement after it."""

    timeout_s: int = setting(
        600,
        "Seconds each check of the proof may take; one that runs out of them ends the proof.",
        minimum=5,
    )
    bench_s: int = setting(
        120,
        "Seconds the speed is measured for, with the gateway open, after a proof under new "
        "versions of driver, kernel, docker, toolkit, image or plugin; 0 leaves it out.",
        minimum=0,
        maximum=1800,
    )
    bench_worse_percent: int = setting(
        15,
        "A speed that is worse than at the last proof by more than this is reported, with a way "
        "back.",
        minimum=1,
        maximum=90,
    )
