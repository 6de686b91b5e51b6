"""Trouble in the kernel log: GPU faults and failed allocations."""

from __future__ import annotations

import re

from spark_host.system import programs

NO_MEMORY = "no_memory"  # of the GPU driver
_TROUBLE = {
    "xid": re.compile(r"NVRM: Xid"),
    NO_MEMORY: re.compile(r"NV_ERR_NO_MEMORY"),
    "oom_kills": re.compile(r"[Oo]ut of memory: Killed process"),
}
_MOST_BYTES = 16 << 20
_LIMIT_S = 30.0


def count_troubles(last_s: float | None = None) -> dict[str, int]:
    """Count the lines of each kind since the boot, or in the last seconds."""
    argv = ["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "cat"]
    if last_s is not None:
        argv.append(f"--since=-{last_s:.0f}s")
    try:
        text = programs.beginning_of(argv, _LIMIT_S, _MOST_BYTES)
    except OSError:
        text = None
    return parse_troubles(text or "")


def parse_troubles(text: str) -> dict[str, int]:
    """Count the lines of each kind in a kernel log."""
    return {name: len(pattern.findall(text)) for name, pattern in _TROUBLE.items()}
