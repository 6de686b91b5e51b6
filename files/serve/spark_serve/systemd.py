"""Questions to and requests of systemd, through ``systemctl``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable

UnitState = dict[str, str]

_ENVIRONMENT = {**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0"}


def systemctl(*words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run ``systemctl`` and return what it said; the caller judges the exit code."""
    return subprocess.run(
        ["systemctl", "--no-pager", *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=_ENVIRONMENT,
        check=False,
    )


def show(units: Iterable[str], properties: Iterable[str]) -> dict[str, UnitState]:
    """Return the properties of several units, asked in one call.

    Args:
        units: Full unit names; units that systemd never saw answer as inactive.
        properties: Property names; ``Id`` is added.
    """
    wanted = list(dict.fromkeys(units))
    if not wanted:
        return {}
    fields = ",".join(["Id", *properties])
    said = systemctl("show", "-p", fields, "--", *wanted)
    states: dict[str, UnitState] = {}
    for block in said.stdout.split("\n\n"):
        pairs = (line.partition("=") for line in block.splitlines() if "=" in line)
        state = {key: value for key, _, value in pairs}
        if "Id" in state:
            states[state["Id"]] = state
    return states


def state(unit: str, *properties: str) -> UnitState:
    """Return the properties of one unit."""
    found = show([unit], properties)
    return found.get(unit) or next(iter(found.values()), {})


def is_active(unit: str) -> bool:
    """Return whether the unit is fully up."""
    return state(unit, "ActiveState").get("ActiveState") == "active"


def invocation(unit: str) -> str | None:
    """Return the id of the unit's present run, the identity a proof is bound to."""
    return state(unit, "InvocationID").get("InvocationID") or None


def listed(pattern: str) -> list[str]:
    """Return the loaded units that match ``pattern``, in any state."""
    said = systemctl("list-units", "--all", "--plain", "--no-legend", pattern)
    return [line.split()[0] for line in said.stdout.splitlines() if line.strip()]


def is_stopping() -> bool:
    """Return whether the machine is on its way down."""
    return systemctl("is-system-running").stdout.strip() == "stopping"


def journal(invocation_id: str, unit: str, lines: int | None = None) -> list[str]:
    """Return what one run of a unit printed, oldest line first."""
    words = ["journalctl", "--no-pager", "-q", "-o", "cat", "-u", unit]
    if invocation_id:
        words.append(f"_SYSTEMD_INVOCATION_ID={invocation_id}")
    if lines is not None:
        words += ["-n", str(lines)]
    said = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=60,
        env=_ENVIRONMENT,
        check=False,
        errors="replace",
    )
    return said.stdout.splitlines()
