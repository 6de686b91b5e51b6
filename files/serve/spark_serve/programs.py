"""Ask a program of the host for what it prints."""

from __future__ import annotations

import os
import subprocess

_LIMIT_S = 20.0
_PATIENT_S = 60.0  # the second time, on a host that is too busy for the first limit


class ProgramSilent(Exception):  # noqa: N818 - named after what happened
    """The program is there but did not end in time: what it knows is unknown, not absent."""


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


def _said(argv: tuple[str, ...], limit_s: float) -> str | None:
    try:
        said = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError:
        return None
    return said.stdout.strip() if said.returncode == 0 else None
