"""When a host changes between releases by itself, and the timers that have it do so."""

from __future__ import annotations

from collections.abc import Sequence

from spark_contract.host.units import HOURS, SWITCH, UNITS_DIR

from spark_deploy.managed import ManagedFile
from spark_deploy.planning.types import ScheduledPlan


def timer_files(schedule: Sequence[ScheduledPlan]) -> tuple[ManagedFile, ...]:
    """Return a timer for each release of a schedule.

    It starts the same unit as a deploy does: proven, with a way back. A time that passed while the
    host was off is left out: of several missed ones, nobody could say which is to win.
    """
    times: dict[str, list[str]] = {}
    for one in schedule:
        times.setdefault(one.release.name, []).append(one.at)
    return tuple(
        ManagedFile(f"{UNITS_DIR}/{HOURS.of(name)}", _text(name, at).encode())
        for name, at in times.items()
    )


def _text(release: str, times: Sequence[str]) -> str:
    calendar = "".join(f"OnCalendar={at}\n" for at in times)
    return (
        f"[Unit]\nDescription=Times at which the Spark service changes to {release}\n\n"
        f"[Timer]\n{calendar}Unit={SWITCH.of(release)}\nAccuracySec=10s\n\n"
        "[Install]\nWantedBy=timers.target\n"
    )
