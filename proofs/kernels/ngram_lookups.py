"""Time lookups in an n-gram table on a disk; it has 4 GiB, the true one 27."""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "files" / "image")]

from spark_vllm.ngram_table import (  # noqa: E402 # after the path above
    BLOCK_BYTES,
    FORMAT,
    Table,
    table_path,
)

WIDTH, ROW_BYTES, PER_BLOCK = 160, 90, 45
HEADS, TRUE_ROWS = 16, 320_001_536
BATCHES = (1, 2, 4, 8, 16)
DRAFTS = 2
REPEATS = 60
PROMPT = 2048
TABLE_BYTES = 4 << 30


def write_table(directory: Path, blocks: int) -> Path:
    path = table_path(directory, 1)
    header = {
        "format": FORMAT, "rows": blocks * PER_BLOCK, "width": WIDTH,
        "number_format": "e2m1", "scale": 1.0,
    }  # fmt: skip
    payload = os.urandom(PER_BLOCK * ROW_BYTES).ljust(BLOCK_BYTES - 4, b"\0")
    with path.open("wb") as file:
        file.write(_seal(json.dumps(header).encode().ljust(BLOCK_BYTES - 4, b"\0"), 0))
        for number in range(1, blocks + 1):
            file.write(_seal(payload, number))
        file.flush()
        os.fsync(file.fileno())
    return path


def _seal(content: bytes, number: int) -> bytes:
    return content + zlib.crc32(content, number).to_bytes(4, "little")


def drop_from_memory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def time_steps(
    path: Path, make_ids: Any, tokens: int, repeats: int, *, verified: bool = False
) -> dict[str, Any]:
    """Time lookups of ``tokens`` tokens: microseconds a step."""
    table = Table(path, 1 << 20)
    out = np.empty((tokens * HEADS, ROW_BYTES), np.uint8)
    for number in range(repeats if verified else 0):
        table.lookup(np.ascontiguousarray(make_ids(number, tokens)).reshape(-1), out)
    times = []
    for number in range(repeats):
        ids = np.ascontiguousarray(make_ids(number, tokens)).reshape(-1)
        started = time.perf_counter()
        table.lookup(ids, out)
        times.append((time.perf_counter() - started) * 1e6)
    table.close()
    return {
        "rows": tokens * HEADS,
        "median_us": round(statistics.median(times), 1),
        "p95_us": round(sorted(times)[int(len(times) * 0.95)], 1),
    }


def measure(directory: Path) -> dict[str, Any]:
    path = write_table(directory, TABLE_BYTES // BLOCK_BYTES)
    rows = path.stat().st_size // BLOCK_BYTES * PER_BLOCK - PER_BLOCK
    source = np.random.default_rng(1)

    def cold(_: int, tokens: int) -> Any:
        return source.integers(0, rows, tokens * HEADS)

    def same(_: int, tokens: int) -> Any:
        return np.arange(tokens * HEADS) * 977 % rows

    known: dict[int, Any] = {}

    def in_page_cache(number: int, tokens: int) -> Any:
        """Return ids that were read once, but are too many for the row cache."""
        if tokens not in known:
            known[tokens] = source.integers(0, rows, (REPEATS, tokens * HEADS))
        return known[tokens][number % REPEATS]

    steps: dict[str, Any] = {}
    for batch in BATCHES:
        tokens = batch * (1 + DRAFTS)
        drop_from_memory(path)
        result = {"disk": time_steps(path, cold, tokens, REPEATS)}
        again = {"verified": True}
        result["page cache"] = time_steps(path, in_page_cache, tokens, REPEATS, **again)
        result["row cache"] = time_steps(path, same, tokens, REPEATS)
        steps[f"{batch} requests, {DRAFTS} drafts"] = result
    prompt: dict[str, Any] = {}
    drop_from_memory(path)
    prompt["disk"] = time_steps(path, cold, PROMPT, 3)
    drop_from_memory(path)
    with mock.patch.object(Table, "_prefetch"):
        prompt["disk without read-ahead"] = time_steps(path, cold, PROMPT, 3)
    prompt["page cache"] = time_steps(path, in_page_cache, PROMPT, 3, verified=True)
    return {
        "file_gib": TABLE_BYTES >> 30,
        "rows_per_token": HEADS,
        "true_table_gib": round((-(-TRUE_ROWS // PER_BLOCK) + 1) * BLOCK_BYTES / 2**30, 2),
        "steps": steps,
        f"prompt of {PROMPT} tokens": prompt,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the table is written beside it")
    arguments = parser.parse_args()
    from proofs.result_files import describe_run, write_result

    with tempfile.TemporaryDirectory(dir=arguments.out.parent) as directory:
        figures = measure(Path(directory))
    cores = f"{platform.machine()}, {os.cpu_count()} cores, local disk; no GPU is used"
    document = {
        "command": "python3 proofs/kernels/ngram_lookups.py",
        "stage": "ngram-lookups",
        **describe_run(cores, "numpy"),
        "caveats": ["not a GB10 and not its disk"],
        "figures": figures,
        "rows": [],
    }
    write_result(arguments.out, document)


if __name__ == "__main__":
    main()
