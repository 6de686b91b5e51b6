"""Time and start limits of a release's unit, in a drop-in beside its template.

They belong to the release because they follow from its load time.
"""

from __future__ import annotations

from spark_contract.host.paths import engine_dir
from spark_contract.serving.release import Release

from spark_deploy.planning.work.jobs import needs_mounts

_DELAY_S = 60
_BURST = 3  # failing starts
_STARTING_STEPS = 3  # ExecStartPre, ExecStart, ExecStartPost: systemd times each by itself
_STOPPING_STEPS = 3  # ExecStop, the signals, ExecStopPost: likewise


def limits(release: Release) -> str:
    """Return the drop-in with this release's time and start limits."""
    again = start_limits(release)
    directories = (mount.source for mount in release.engine.mounts)
    return (
        "[Unit]\n"
        f"{needs_mounts(*directories, engine_dir(release.service))}"
        f"StartLimitIntervalSec={again['interval_s']}\n"
        f"StartLimitBurst={again['burst']}\n"
        "[Service]\n"
        f"RestartSec={again['delay_s']}\n"
        f"TimeoutStartSec={_start_step_s(release)}\n"
        f"TimeoutStopSec={_stop_step_s(release)}\n"
    )


def start_limits(release: Release) -> dict[str, float]:
    """Return how often a failing engine is started again, and within which time.

    The limit must trigger even if every step hangs to its own: a shorter interval would let such
    an engine start for ever. The price: as many crashes within these hours, each after serving
    well, end the service too.
    """
    starting_s = _STARTING_STEPS * _start_step_s(release)
    stopping_s = _STOPPING_STEPS * _stop_step_s(release)
    interval_s = _BURST * (starting_s + stopping_s + _DELAY_S) + 600
    return {"delay_s": _DELAY_S, "burst": _BURST, "interval_s": interval_s}


def _start_step_s(release: Release) -> float:
    return release.timeouts.start_s + release.memory.wait_s + 120


def _stop_step_s(release: Release) -> float:
    return release.timeouts.stop_s + 60
