"""Queries and controls systemd with ``systemctl`` and ``journalctl``."""

import subprocess
from collections.abc import Iterable

from spark_contract.tool import HostToolError

from spark_host.system.programs import read_output_start, run_program

UnitState = dict[str, str]

_TIMEOUT_S = 60.0
_JOURNAL_TIMEOUT_S = 60.0
_JOURNAL_BYTES = 64 << 20  # an engine may log without limit; checks need the start of a run
_ENABLE_TIMEOUT_S = 120.0  # enable and disable reload all units


def systemctl(*args: str, timeout_s: float = _TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    return run_program(["systemctl", "--no-pager", *args], timeout_s)


def _query(*args: str) -> str:
    result = systemctl(*args, timeout_s=_TIMEOUT_S)
    if result.returncode == 124:  # otherwise, a timeout would look like an empty answer
        fix = "run the command again when the host is less busy"
        raise HostToolError(f"systemctl {args[0]}", result.stderr, fix)
    return result.stdout


def show(units: Iterable[str], properties: Iterable[str]) -> dict[str, UnitState]:
    """Return properties by unit; unknown units are inactive."""
    names = list(dict.fromkeys(units))
    if not names:
        return {}
    return _parse_states(_query("show", "-p", ",".join(["Id", *properties]), "--", *names))


def show_loaded(patterns: Iterable[str], properties: Iterable[str]) -> dict[str, UnitState]:
    """Return properties of loaded units; unlike :func:`show`, this does not read unit files."""
    args = ("show", "--all", "-p", ",".join(["Id", *properties]), "--", *patterns)
    return _parse_states(_query(*args))


def _parse_states(output: str) -> dict[str, UnitState]:
    states: dict[str, UnitState] = {}
    for block in output.split("\n\n"):
        pairs = (line.partition("=") for line in block.splitlines() if "=" in line)
        state = {key: value for key, _, value in pairs}
        if "Id" in state:
            states[state["Id"]] = state
    return states


def state(unit: str, *properties: str) -> UnitState:
    states = show([unit], properties)
    return states.get(unit) or next(iter(states.values()), {})


def is_active(unit: str) -> bool:
    return state(unit, "ActiveState").get("ActiveState") == "active"


def is_queued(unit: UnitState) -> bool:
    """Return whether systemd has queued the unit; needs the property ``Job``."""
    return unit.get("Job", "0") not in ("", "0")


def read_invocation_id(unit: str) -> str | None:
    return state(unit, "InvocationID").get("InvocationID") or None


def run_systemctl(verb: str, *args: str, limit_s: float = _TIMEOUT_S) -> None:
    unit = args[-1]
    result = systemctl(verb, *args, timeout_s=limit_s)
    if result.returncode != 0:
        message = result.stderr.strip() or "failed"
        command = "systemctl unmask" if "masked" in message else "journalctl -u"
        raise HostToolError(f"systemctl {verb} {unit}", message, f"run `{command} {unit}`")


def reload() -> None:
    systemctl("daemon-reload")


def reset_failed(unit: str, limit_s: float = _TIMEOUT_S) -> None:
    systemctl("reset-failed", unit, timeout_s=limit_s)


def start_in_background(unit: str) -> None:
    reset_failed(unit)
    run_systemctl("start", "--no-block", unit)


def start(unit: str, limit_s: float) -> None:
    reset_failed(unit)
    run_systemctl("start", unit, limit_s=limit_s)


def stop(unit: str, limit_s: float) -> None:
    run_systemctl("stop", unit, limit_s=limit_s)


def enable(unit: str) -> None:
    run_systemctl("enable", unit, limit_s=_ENABLE_TIMEOUT_S)


def disable(unit: str) -> None:
    run_systemctl("disable", unit, limit_s=_ENABLE_TIMEOUT_S)


def list_units(pattern: str) -> list[str]:
    output = _query("list-units", "--all", "--plain", "--no-legend", pattern)
    return [line.split()[0] for line in output.splitlines() if line.strip()]


def is_stopping() -> bool:
    return systemctl("is-system-running").stdout.strip() == "stopping"


def journal(invocation_id: str, unit: str, lines: int | None = None) -> list[str]:
    """Return the log of a run, or of all runs without ``invocation_id``; the oldest line first."""
    argv = ["journalctl", "--no-pager", "-q", "-o", "cat", "-u", unit]
    if invocation_id:
        argv.append(f"_SYSTEMD_INVOCATION_ID={invocation_id}")
    if lines is not None:
        argv += ["-n", str(lines)]
    output = read_output_start(argv, _JOURNAL_TIMEOUT_S, _JOURNAL_BYTES)
    if output is None:
        return [f"(journalctl did not exit within {_JOURNAL_TIMEOUT_S:.0f} s)"]
    return output.splitlines()
