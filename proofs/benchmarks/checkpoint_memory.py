"""Measure peak memory and time of building the largest model's checkpoint in real size.

    python proofs/benchmarks/checkpoint_memory.py --work /var/tmp/bench

Needs Linux and 12 GB below --work. Writes proofs/results/checkpoint-memory.json; exits with
1 if a build took more than the limit.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOMES = (".", "files/contract", "files/checkpoint", "proofs/benchmarks")
sys.path[:0] = [str(ROOT / home) for home in HOMES]

from checkpoint_sources import (  # noqa: E402
    DONOR_COMMIT,
    base_entries,
    mtp,
    plan,
    write_base,
    write_donor,
)

from lab.hub.server import FileHandler, Hub  # noqa: E402
from lab.hub.store import FileRecord, NotFoundError, Store  # noqa: E402
from lab.webserver import LabHttpServer  # noqa: E402
from proofs.result_files import describe_run  # noqa: E402
from proofs.whole.trees import shape_of, size_of  # noqa: E402
from spark_deploy.config.catalog.load import read_catalog  # noqa: E402

RESULT = ROOT / "proofs/results/checkpoint-memory.json"
# rusage would include the parent that the process was forked from.
_WRAPPER = """
import os, sys
os.cpu_count = lambda: int(os.environ["SPARK_BENCH_CORES"])
import checkpoint_holes
from spark_checkpoint.__main__ import main
code = main(sys.argv[2:])
lines = open("/proc/self/status").read().splitlines()
peak = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
open(sys.argv[1], "w").write(peak)
sys.exit(code)
"""
LARGEST = shape_of(asdict(read_catalog().model("qwen3.5-397b").architecture))
# Changes to a plan for an overlay that keeps the head.
BUILDS: dict[str, dict[str, str]] = {
    "overlay": {},
    "overlay_int8_head": {"head": "int8-g128"},
    "full_int8_head": {"layout": "full", "head": "int8-g128"},
}
# A Spark's: more workers take more memory.
CORES = 20
LIMIT_BYTES = 256 << 20
REPOSITORY = f"bench/donor/resolve/{DONOR_COMMIT}"


class _Files(FileHandler):
    root: Path

    def route(self, path: str) -> None:
        file = self.root / path.lstrip("/")
        if not file.is_file():
            raise NotFoundError("EntryNotFound", path)
        self.send_file(FileRecord(path, file.stat().st_size, "", "", False, file), {})


@contextmanager
def serve(root: Path) -> Iterator[str]:
    hub = Hub(Store(root), "", Path(os.devnull))
    server = LabHttpServer(("127.0.0.1", 0), type("Handler", (_Files,), {"root": root, "hub": hub}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def measure(work: Path) -> dict[str, Any]:
    base, donor = work / "base", work / "hub" / REPOSITORY
    write_base(base, LARGEST)
    write_donor(donor, LARGEST)
    entries = base_entries(LARGEST) + mtp(LARGEST)
    done = {name: _build(work, changes) for name, changes in BUILDS.items()}
    peaks = {name: run["peak_bytes"] for name, run in done.items()}
    row = {
        "tree_bytes": size_of(entries),
        "largest_shard_bytes": max(path.stat().st_size for path in base.glob("*.safetensors")),
        "tensors": len(entries),
        "peak_bytes": peaks,
        "seconds": {name: round(run["seconds"], 1) for name, run in done.items()},
        "cpu_seconds": {name: round(run["cpu_seconds"], 1) for name, run in done.items()},
    }
    return {
        "trees": {"397b_real_size": row},
        "largest_peak_bytes": max(peaks.values()),
        "workers_as_on_cores": CORES,
        "limit_bytes": LIMIT_BYTES,
        "within_limit": max(peaks.values()) <= LIMIT_BYTES,
    }


def _build(work: Path, changes: dict[str, str]) -> dict[str, Any]:
    base, out = work / "base", work / "out"
    with serve(work / "hub") as url:
        donor = {"url": f"{url}/{REPOSITORY}", "parallel": 8, "tries": 8, "backoff_s": 1.0}
        document = plan(base, out, LARGEST, donor=donor, **changes)
        (work / "plan.json").write_text(json.dumps(document))
        done = _run_builder(work / "plan.json")
    shutil.rmtree(out)
    return done


def _run_builder(plan_file: Path) -> dict[str, Any]:
    path = os.pathsep.join(str(ROOT / home) for home in HOMES)
    environment = {**os.environ, "PYTHONPATH": path, "SPARK_BENCH_CORES": str(CORES)}
    with tempfile.NamedTemporaryFile("r") as peak:
        command = [sys.executable, "-c", _WRAPPER, peak.name, "build", str(plan_file)]
        began = time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"spark_checkpoint build failed with exit status {process.returncode}")
        return {
            "seconds": seconds,
            "peak_bytes": int(peak.read()) * 1024,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
        }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())}, {os.cpu_count()} cores"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="a directory to be made")
    work: Path = parser.parse_args().work
    work.mkdir(parents=True)
    command = "python proofs/benchmarks/checkpoint_memory.py --work DIR"
    origin = {"command": command, **describe_run(_processor(), "numpy")}
    try:
        document = {**origin, "load_1_min": round(os.getloadavg()[0], 1), **measure(work)}
    finally:
        shutil.rmtree(work)
    RESULT.write_text(json.dumps(document, indent=2) + "\n")
    print(RESULT.read_text())
    return 0 if document["within_limit"] else 1


if __name__ == "__main__":
    sys.exit(main())
