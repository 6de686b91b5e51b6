import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

from spark_contract import documents

_TIMEOUT_S = 20.0
_KILL_WAIT_S = 1.0
_RETRY_TIMEOUT_S = 60.0  # the second try, for busy hosts

Report = Callable[[str], None]  # receives a progress line


class ProgramTimeoutError(Exception):
    """The program did not exit in time, so the result is unknown."""


# Killed programs that are stuck in a driver, by name.
_stuck: dict[str, subprocess.Popen[str]] = {}


def run_program(
    argv: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program; the exit code is 127 if it is not installed and 124 after the timeout."""
    message = f"did not exit within {limit_s:.0f} s"
    stuck = _stuck.get(argv[0])
    if stuck is not None and stuck.poll() is None:  # another process would also get stuck
        return subprocess.CompletedProcess(argv, 124, "", message)
    try:
        child = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            env=environment or _environment(),
        )  # fmt: skip
    except OSError as error:
        code, reason = 126, f"cannot be run ({error.strerror})"
        if isinstance(error, FileNotFoundError):
            code, reason = 127, "is not installed"
        return subprocess.CompletedProcess(argv, code, "", f"{argv[0]} {reason}")
    try:
        output, error_text = child.communicate(timeout=limit_s)
        return subprocess.CompletedProcess(argv, child.returncode, output, error_text)
    except subprocess.TimeoutExpired:
        child.kill()
        try:  # not for long, because a stuck driver can keep the process alive
            child.wait(_KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            _stuck[argv[0]] = child
        return subprocess.CompletedProcess(argv, 124, "", message)
    finally:
        for pipe in filter(None, (child.stdout, child.stderr)):
            pipe.close()


def error_line(result: subprocess.CompletedProcess[str]) -> str:
    lines = (result.stderr or result.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {result.returncode}"


def read_output_start(argv: Sequence[str], limit_s: float, max_bytes: int) -> str | None:
    """Return the first bytes of a program's output; ``None`` after a timeout."""
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()
    ) as child:
        assert child.stdout is not None
        timed_out = threading.Event()

        def end() -> None:
            timed_out.set()
            child.kill()

        timer = threading.Timer(limit_s, end)
        timer.start()
        output = child.stdout.read(max_bytes)
        timer.cancel()
        child.kill()
    return None if timed_out.is_set() else output.decode(errors="replace")


def _environment() -> dict[str, str]:
    # netplan and ufw are Python programs, which our PYTHON* variables would break.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return {**inherited, "LC_ALL": "C", "SYSTEMD_COLORS": "0"}


def read_output(*argv: str) -> str | None:
    """Return trimmed output, or ``None`` if the program is absent, failed or timed out."""
    result = run_program(argv, _TIMEOUT_S)
    return result.stdout.strip() if result.returncode == 0 else None


def read_output_with_retry(*argv: str) -> str | None:
    """Like :func:`read_output`, but retry once; raise ProgramTimeoutError after two timeouts."""
    for limit_s in (_TIMEOUT_S, _RETRY_TIMEOUT_S):
        result = run_program(argv, limit_s)
        if result.returncode != 124:
            return result.stdout.strip() if result.returncode == 0 else None
    raise ProgramTimeoutError(f"{argv[0]} {result.stderr}")


def print_json(document: object) -> None:
    print(json.dumps(documents.to_plain(document)), flush=True)


def log(text: str) -> None:
    print(text, flush=True)
