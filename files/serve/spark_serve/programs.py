"""Ask a program of the host for what it prints."""

from __future__ import annotations

import os
import subprocess

_LIMIT_S = 20


def output_of(*argv: str) -> str | None:
    """Return a program's standard output in plain English, trimmed.

    ``None`` means that it is absent, failed, or did not end in time: a driver that hangs must not
    hang those who ask it.
    """
    try:
        said = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() if said.returncode == 0 else None
