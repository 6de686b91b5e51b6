"""Break a run of the builder at a chosen system call, or a file by a bit."""

import os
import re

from builder_trees import run_tool
from builder_zygote import WATCHED, WRITING

POINTS = int(os.environ.get("SPARK_FAULT_POINTS", "10"))
NAMES = {"kill": WATCHED, "disk_full": WRITING}


def run_broken(*arguments, act="kill", number=0, path=None, names=None, only_path=False):
    fault = {
        "act": act,
        "number": number,
        "path": None if path is None else str(path),
        "names": names or NAMES[act],
        "only_path": only_path,
        "no_room_gate": True,
    }
    done = run_tool(*arguments, check=False, fault=fault)
    calls = re.search(r"^calls=(\d+)$", done.stdout, re.MULTILINE)
    done.calls = int(calls[1]) if calls else 0
    return done


def spread_calls(calls):
    spread = {1 + round(n * (calls - 1) / (POINTS - 1)) for n in range(POINTS)}
    return sorted(spread | set(range(max(1, calls - 8), calls + 1)))


def flip(path, *, keep_time, offset=None):
    status = path.stat()
    offset = status.st_size - 100 if offset is None else offset
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
