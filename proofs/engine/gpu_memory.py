"""Share the memory of GPUs between the engines of all tests on this machine."""

import contextlib
import fcntl
import functools
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(tempfile.gettempdir()) / "spark-gpu-memory"
SHARE = 0.75
"""The rest is for servers and kernels of other tests, which reserve nothing.

On the first GPU, each parallel test keeps a CUDA context of up to 1 GiB.
"""
OVERHEAD_BYTES = 4 << 30  # CUDA context, activations and graphs
CACHE_BYTES = 1 << 29  # the default of ``proofs.engine.case``


def needed_gib(options: dict[str, Any], tree: Path) -> int:
    weights_bytes = sum(path.stat().st_size for path in tree.glob("*.safetensors"))
    cache_bytes = int(options.get("kv_cache_memory_bytes", CACHE_BYTES))
    return -(-(weights_bytes + cache_bytes + OVERHEAD_BYTES) // (1 << 30))


@contextlib.contextmanager
def reserve(device: str, gib: int) -> Iterator[None]:
    """Wait until a GPU has the memory, and hold it: a locked file per GiB, all files or none."""
    total = int(SHARE * memory_gib(device))
    gib = min(gib, total)
    FOLDER.mkdir(exist_ok=True)
    while True:
        with contextlib.ExitStack() as held:
            with (FOLDER / "taking").open("w") as taking:
                fcntl.flock(taking, fcntl.LOCK_EX)
                paths = (FOLDER / f"{device}-{number}" for number in range(total))
                locked = (path for path in paths if _lock(path, held))
                count = sum(1 for _, _ in zip(range(gib), locked, strict=False))
            if count == gib:
                yield
                return
        time.sleep(1)


def _lock(path: Path, held: contextlib.ExitStack) -> bool:
    file = held.enter_context(path.open("w"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@functools.cache
def memory_gib(device: str) -> int:
    if device == "none":  # an engine on the CPU
        return 0
    query = [
        "nvidia-smi",
        "-i",
        device,
        "--query-gpu=memory.total",
        "--format=csv,noheader,nounits",
    ]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) >> 10
