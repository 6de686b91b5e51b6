"""Runs the builder as a host does, and reads its own account of its memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Peak memory as the process itself sees it: rusage would include the parent it was forked from.
_WRAPPER = """
import os, sys
if "SPARK_BENCH_CORES" in os.environ:
    os.cpu_count = lambda: int(os.environ["SPARK_BENCH_CORES"])
if os.environ.get("SPARK_BENCH_HOLES"):
    import checkpoint_holes
from spark_checkpoint.cli import main
code = main(sys.argv[2:])
lines = open("/proc/self/status").read().splitlines()
peak = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
open(sys.argv[1], "w").write(peak)
sys.exit(code)
"""


def run_builder(*arguments: str, cores: int | None = None, holes: bool = False) -> dict[str, Any]:
    """Run the builder and return seconds and peak memory.

    Args:
        arguments: The builder's own.
        cores: How many cores it believes to have: its workers follow from that.
        holes: Leave zeros out of what it writes, so that a result of any size fits.
    """
    homes = ("files/contract", "files/checkpoint", "proofs/benchmarks")
    path = os.pathsep.join(str(ROOT / home) for home in homes)
    environment = {**os.environ, "PYTHONPATH": path}
    if cores is not None:
        environment["SPARK_BENCH_CORES"] = str(cores)
    if holes:
        environment["SPARK_BENCH_HOLES"] = "1"
    with tempfile.NamedTemporaryFile("r") as peak:
        command = [sys.executable, "-c", _WRAPPER, peak.name, *arguments]
        began = time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"spark_checkpoint {arguments[0]} ended with {process.returncode}")
        return {
            "seconds": seconds,
            "peak_bytes": int(peak.read()) * 1024,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
        }


def forget(directory: Path) -> None:
    """Drop a tree from the page cache, so that every contender reads the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
