"""Run programs of the host; a failure carries the program's own last lines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab.errors import LabError

# sbin is not in the PATH of every root shell (su without -, cron, some CI runners).
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


_kept_open: list[int] = []


@contextmanager
def kept_open(descriptor: int) -> Iterator[None]:
    """Let the programs we run hold ``descriptor`` open too.

    For a lock: if we are killed, it stays taken until the program we left behind has ended.
    """
    _kept_open.append(descriptor)
    try:
        yield
    finally:
        _kept_open.remove(descriptor)


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> str:
    """Run ``argv`` and return its standard output.

    Raises:
        LabError: the program is missing or, with ``check``, its exit status is not 0.
    """
    words = [str(word) for word in argv]
    full_env = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", **(env or {})}
    full_env["PATH"] = f"{_PATH}:{full_env.get('PATH', '')}"
    try:
        done = subprocess.run(
            words,
            input=stdin,
            capture_output=True,
            text=True,
            env=full_env,
            cwd=cwd,
            check=False,
            stdin=subprocess.DEVNULL if stdin is None else None,
            pass_fds=_kept_open,
        )
    except FileNotFoundError as error:
        raise LabError(words[0], "program not found", "run `lab prepare` as root") from error
    if check and done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise LabError(
            " ".join(words[:4]),
            f"exit status {done.returncode}\n{tail}",
            "read the lines above; run `lab down` and try again",
        )
    return done.stdout


def succeeds(argv: Sequence[str | Path]) -> bool:
    """Tell whether ``argv`` exits with 0."""
    try:
        run(argv)
    except LabError:
        return False
    return True
