"""Ask a program of the host for what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

from spark_contract import documents

_LIMIT_S = 20.0
_DEATH_S = 1.0  # a program that was killed dies within this, or is stuck
_PATIENT_S = 60.0  # the second time, on a host that is too busy for the first limit


class ProgramSilent(Exception):  # noqa: N818 - named after what happened
    """The program is there but did not end in time: what it knows is unknown, not absent."""


def finished(
    argv: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it said, in plain English; the caller judges it.

    One that is not installed answers like one that failed, with the shell's code 127; one that
    does not end in time with the code 124 of timeout(1).
    """
    try:
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env=environment or _in_english(),
            check=False,
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(argv, 127, "", f"{argv[0]} is not installed")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"no answer within {limit_s:.0f} s")


def beginning_of(argv: Sequence[str], limit_s: float, most_bytes: int) -> str | None:
    """Return what a program prints up to so many bytes; ``None`` when that took too long."""
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_in_english()
    ) as child:
        assert child.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(limit_s, end)
        timer.start()
        said = child.stdout.read(most_bytes)
        timer.cancel()
        child.kill()
    return None if late.is_set() else said.decode(errors="replace")


def _in_english() -> dict[str, str]:
    # Programs in Python, as netplan and ufw are, find their own modules and not ours.
    theirs = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**theirs, "LC_ALL": "C", "SYSTEMD_COLORS": "0"}


def output_of(*argv: str) -> str | None:
    """Return a program's standard output in plain English, trimmed.

    ``None`` means that it is absent, failed, or did not end in time: a driver that hangs must not
    hang those who ask it.
    """
    try:
        return _said(argv, _LIMIT_S)
    except subprocess.TimeoutExpired:
        return None


def patient_output_of(*argv: str) -> str | None:
    """Return what :func:`output_of` does, for answers that must not be taken for absent.

    Raises:
        ProgramSilent: it did not end within a longer limit either.
    """
    for limit_s in (_LIMIT_S, _PATIENT_S):
        try:
            return _said(argv, limit_s)
        except subprocess.TimeoutExpired:
            continue
    raise ProgramSilent(f"{argv[0]} did not end within {_PATIENT_S:.0f} s")


# Programs that were killed and did not die: stuck in a driver, they wait for it.
_stuck: dict[str, subprocess.Popen[str]] = {}


def _said(argv: tuple[str, ...], limit_s: float) -> str | None:
    stuck = _stuck.get(argv[0])
    if stuck is not None and stuck.poll() is None:
        # Another one would get stuck beside it, and the next one beside both.
        raise subprocess.TimeoutExpired(argv, 0)
    try:
        child = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_in_english(),
        )
    except OSError:
        return None
    try:
        said, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _give_up(argv[0], child)
        raise
    return said.strip() if child.returncode == 0 else None


def _give_up(name: str, child: subprocess.Popen[str]) -> None:
    """Kill a program without waiting for its death, which a driver that hangs can keep away."""
    child.kill()
    if child.stdout is not None:
        child.stdout.close()
    try:
        child.wait(_DEATH_S)
    except subprocess.TimeoutExpired:
        _stuck[name] = child


Report = Callable[[str], None]  # takes one line about what is going on


def answer(document: object) -> None:
    """Print a document as one line of JSON, for who asked."""
    print(json.dumps(documents.plain(document)), flush=True)


def log(text: str) -> None:
    """Print one line for the journal at once."""
    print(text, flush=True)
