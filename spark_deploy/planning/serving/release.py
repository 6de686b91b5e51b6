"""The files of one release on a host."""

from __future__ import annotations

import json
from typing import Any

from spark_deploy.managed import ManagedFile
from spark_deploy.planning.budget.disk import disk_total
from spark_deploy.planning.digest import plain
from spark_deploy.planning.serving.serve import start_limit_s, stop_limit_s
from spark_deploy.planning.types import HostPlan
from spark_deploy.planning.work.jobs import needs_mounts

UNITS_DIR = "/etc/systemd/system"
GATEWAY_USER = "spark-gateway"  # made by files/units/spark-sysusers.conf


def unit_files_of(plan: HostPlan, units: tuple[ManagedFile, ...]) -> tuple[ManagedFile, ...]:
    """Return the static units, and the commands that people and our own messages use by name."""
    return (*units, _command("spark-check", " check", plan), _command("spark-host", "", plan))


def _command(name: str, verb: str, plan: HostPlan) -> ManagedFile:
    path = f"/usr/local/bin/{name}"
    # Sockets, proofs and journals are root's; who logs in to look is mostly not.
    text = (
        f'#!/bin/sh\n[ "$(id -u)" = 0 ] || exec sudo -- {path} "$@"\n'
        f'exec {plan.paths.tools_dir}/current/bin/spark-host{verb} "$@"\n'
    )
    return ManagedFile(path, text.encode(), 0o755)


def release_files_of(plan: HostPlan) -> tuple[ManagedFile, ...]:
    """Return release.json, the plan it came from and the unit's limits."""
    serve = plan.serve
    home = f"{plan.paths.config_dir}/releases/{serve.name}"
    release = {**serve.release, "name": serve.name, "digest": serve.digest}
    return (
        ManagedFile(f"{home}/release.json", _json(release)),
        ManagedFile(f"{home}/plan.json", _json(plain({"serve": serve, "memory": plan.memory}))),
        ManagedFile(
            f"{UNITS_DIR}/{serve.unit}.d/50-release.conf",
            limits(release).encode(),
        ),
    )


def document(plan: HostPlan) -> dict[str, Any]:
    """Return the whole plan of a host as plain data, with what follows from its parts."""
    drop_in = release_files_of(plan)[-1]
    peak_bytes, after_bytes = disk_total(plan.disk)
    return {
        **plain(plan),
        "disk_total": {"peak_bytes": peak_bytes, "after_bytes": after_bytes},
        "unit": {
            "name": plan.serve.unit,
            "drop_in": drop_in.path,
            "lines": drop_in.content.decode().splitlines(),
        },
    }


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def limits(release: dict[str, Any]) -> str:
    """Return the drop-in with this release's time and start limits.

    The limits belong to the release because they follow from its load time: a start limit only
    triggers when its interval outlasts ``burst`` failing starts.
    """
    restart, timeouts, memory = release["restart"], release["timeouts"], release["memory"]
    start_s = start_limit_s(timeouts["start_s"], memory["wait_s"])
    directories = (mount["source"] for mount in release["engine"]["mounts"])
    return (
        "[Unit]\n"
        f"{needs_mounts(*directories)}"
        f"StartLimitIntervalSec={restart['interval_s']}\n"
        f"StartLimitBurst={restart['burst']}\n"
        "[Service]\n"
        f"RestartSec={restart['delay_s']}\n"
        f"TimeoutStartSec={start_s}\n"
        f"TimeoutStopSec={stop_limit_s(timeouts['stop_s'])}\n"
    )
