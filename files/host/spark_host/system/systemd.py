"""Questions to and requests of systemd, through ``systemctl``."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

from spark_contract.errors import HostToolError

from spark_host.system.programs import beginning_of, finished

UnitState = dict[str, str]

_LIMIT_S = 60.0
_JOURNAL_S = 60.0
# An engine may print without end. What a check looks for stands at the beginning of a run.
_JOURNAL_BYTES = 64 << 20
_LINK_S = 120.0  # it reads all units anew


def systemctl(*words: str, timeout_s: float = _LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run ``systemctl`` and return what it said; the caller judges the exit code."""
    return finished(["systemctl", "--no-pager", *words], timeout_s)


def _told(*words: str) -> str:
    """Return what ``systemctl`` prints; silence must not be taken for "there is nothing"."""
    said = systemctl(*words, timeout_s=_LIMIT_S)
    if said.returncode == 124:
        raise HostToolError(
            f"systemctl {words[0]}", said.stderr, "run again when the host is less busy"
        )
    return said.stdout


def show(units: Iterable[str], properties: Iterable[str]) -> dict[str, UnitState]:
    """Return the properties of several units, asked in one call; unknown ones are inactive."""
    wanted = list(dict.fromkeys(units))
    if not wanted:
        return {}
    return _states(_told("show", "-p", ",".join(["Id", *properties]), "--", *wanted))


def loaded(patterns: Iterable[str], properties: Iterable[str]) -> dict[str, UnitState]:
    """Return the properties of the units that systemd has in memory; all others are inactive.

    A unit that is asked for by its name is loaded for that, file by file, which takes longer than
    all the rest of a look at the host.
    """
    return _states(_told("show", "--all", "-p", ",".join(["Id", *properties]), "--", *patterns))


def _states(said: str) -> dict[str, UnitState]:
    states: dict[str, UnitState] = {}
    for block in said.split("\n\n"):
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


def _order(verb: str, *words: str, limit_s: float = _LIMIT_S) -> None:
    unit = words[-1]
    said = systemctl(verb, *words, timeout_s=limit_s)
    if said.returncode != 0:
        raise HostToolError(
            f"systemctl {verb} {unit}", said.stderr.strip() or "failed", f"journalctl -u {unit}"
        )


def reload() -> None:
    """Have systemd read its units anew."""
    systemctl("daemon-reload")


def reset(unit: str, limit_s: float = _LIMIT_S) -> None:
    """Forget that a unit failed, and how often it was started."""
    systemctl("reset-failed", unit, timeout_s=limit_s)


def begin(unit: str) -> None:
    """Ask for the start of a unit and do not wait for it; earlier failures do not count."""
    reset(unit)
    _order("start", "--no-block", unit)


def start(unit: str, limit_s: float) -> None:
    """Start a unit and return when it is up; earlier failures do not count."""
    reset(unit)
    _order("start", unit, limit_s=limit_s)


def stop(unit: str, limit_s: float) -> None:
    """Stop a unit and return when it is down."""
    _order("stop", unit, limit_s=limit_s)


def enable(unit: str) -> None:
    """Have a unit start with the host."""
    _order("enable", unit, limit_s=_LINK_S)


def disable(unit: str) -> None:
    """Have a unit not start with the host."""
    _order("disable", unit, limit_s=_LINK_S)


def listed(pattern: str) -> list[str]:
    """Return the loaded units that match ``pattern``, in any state."""
    said = _told("list-units", "--all", "--plain", "--no-legend", pattern)
    return [line.split()[0] for line in said.splitlines() if line.strip()]


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
    said = beginning_of(words, _JOURNAL_S, _JOURNAL_BYTES)
    if said is None:
        return [f"(journalctl gave no answer within {_JOURNAL_S:.0f} s)"]
    return said.splitlines()
