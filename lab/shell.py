"""Runs programs on the machine; a failure includes the last lines of output."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab.errors import LabError

# Some root shells have no sbin in PATH (su without -, cron, CI runners).
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

PROGRESS_EVERY_S = 10.0

_inherited: list[int] = []


@contextmanager
def inherited_descriptor(descriptor: int) -> Iterator[None]:
    """Pass ``descriptor`` to child processes: it stays locked until they exit, even if we die."""
    _inherited.append(descriptor)
    try:
        yield
    finally:
        _inherited.remove(descriptor)


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    show: bool = False,
) -> str:
    words = [str(word) for word in argv]
    full_env = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", **(env or {})}
    full_env["PATH"] = f"{_PATH}:{full_env.get('PATH', '')}"
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if show else subprocess.PIPE,
            text=True,
            env=full_env,
            cwd=cwd,
            pass_fds=_inherited,
        )
    except FileNotFoundError as error:
        raise LabError(words[0], "program not found", "run `lab prepare` as root") from error
    output, errors = _wait(process, Path(words[0]).name, stdin, silent=show)
    if check and process.returncode != 0:
        tail = "\n".join((errors or output).strip().splitlines()[-8:])
        raise LabError(
            " ".join(words[:4]),
            f"exit status {process.returncode}\n{tail}",
            "read the lines above; run `lab down` and try again",
        )
    return output


def _wait(
    process: subprocess.Popen[str], program: str, stdin: str | None, *, silent: bool
) -> tuple[str, str]:
    started = time.monotonic()
    with process:
        try:
            while True:
                try:
                    return process.communicate(stdin, timeout=PROGRESS_EVERY_S)
                except subprocess.TimeoutExpired:
                    stdin = None
                    if not silent:
                        seconds = time.monotonic() - started
                        print(f"  {program}: {seconds:.0f} s", file=sys.stderr, flush=True)
        except BaseException:
            process.kill()
            raise


def succeeds(argv: Sequence[str | Path]) -> bool:
    try:
        run(argv)
    except LabError:
        return False
    return True
