"""Measures the checkpoint builder: time against copying, memory, planning, network.

    python proofs/benchmarks/checkpoint.py full --work /var/tmp/bench --gigabytes 4 --pairs 5
    python proofs/benchmarks/checkpoint.py overlay --work /var/tmp/bench
    python proofs/benchmarks/checkpoint.py memory --work /var/tmp/bench

Needs Linux, numpy and room under --work (full: three times the tree). Each command writes its
result to proofs/results/checkpoint-<command>.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOMES = (".", "files/contract", "files/checkpoint", "proofs/benchmarks")
sys.path[:0] = [str(ROOT / home) for home in HOMES]

from checkpoint_memory import bench_memory  # noqa: E402
from checkpoint_overlay import bench_overlay  # noqa: E402
from checkpoint_run import forget, run_builder  # noqa: E402
from checkpoint_sources import plan, write_base, write_donor  # noqa: E402
from checkpoint_trees import Architecture, base_entries, mtp, size_of  # noqa: E402

from proofs.result_files import describe_run  # noqa: E402

RESULTS = ROOT / "proofs/results"


def small_of(gigabytes: float) -> Architecture:
    """Return the 122B with fewer layers and experts: real tensor sizes, about that many bytes."""
    for layers in range(4, 49, 4):
        found = Architecture(layers=layers, experts=48, vocabulary=65536, shards=layers)
        if sum(map(size_of, base_entries(found) + mtp(found))) >= gigabytes * 1e9:
            return found
    raise SystemExit("too large for this benchmark")


def copy_hashing(source: Path, target: Path, threads: int) -> None:
    """Copy a tree, hashing in the same pass, every file flushed: the yardstick."""
    target.mkdir()

    def one(path: Path) -> None:
        hasher, buffer = hashlib.sha256(), memoryview(bytearray(256 << 10))
        with path.open("rb", buffering=0) as reader, (target / path.name).open("wb", 0) as writer:
            while count := reader.readinto(buffer):
                hasher.update(buffer[:count])
                view = buffer[:count]
                while view:
                    view = view[writer.write(view) :]
            os.fsync(writer.fileno())

    paths = sorted(source.iterdir(), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, paths))


def bench_full(arguments: argparse.Namespace) -> dict[str, Any]:
    """Full layout against copies of the same tree, alternating."""
    work: Path = arguments.work
    architecture = small_of(arguments.gigabytes)
    base, donor, out = work / "base", work / "donor", work / "out"
    write_base(base, architecture, sparse=False)
    write_donor(donor, architecture, _quantise)
    document = plan(base, out, architecture, layout="full", donor={"dir": str(donor)})
    (work / "plan.json").write_text(json.dumps(document))
    contenders: dict[str, Callable[[], Any]] = {
        "build": lambda: run_builder("build", str(work / "plan.json")),
        "copy_hash_fsync_1_thread": lambda: copy_hashing(base, out, 1),
        "copy_hash_fsync_2_threads": lambda: copy_hashing(base, out, 2),
        "cp_r": lambda: subprocess.run(["cp", "-r", str(base), str(out)], check=True),
        "cp_r_and_sync": lambda: subprocess.run(
            f"cp -r {base} {out} && sync -f {out}", shell=True, check=True
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    peak = 0
    for turn in range(arguments.pairs):
        names = list(contenders)
        for name in names if turn % 2 == 0 else reversed(names):
            forget(base)
            os.sync()
            began, cpu_began = time.monotonic(), cpu_seconds()
            done = contenders[name]()
            seconds[name].append(round(time.monotonic() - began, 3))
            cpu[name].append(round(cpu_seconds() - cpu_began, 3))
            if name == "build":
                peak = max(peak, done["peak_bytes"])
            shutil.rmtree(out)
    return {
        "tree_bytes": sum(path.stat().st_size for path in base.iterdir()),
        "tensors": len(base_entries(architecture)) + len(mtp(architecture)),
        "seconds": seconds,
        "median_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "build_over": over("build", seconds),
        # What a flush alone costs, of which no build that flushes gets below.
        "cp_r_and_sync_over_cp_r": over("cp_r_and_sync", seconds)["cp_r"],
        "cpu_seconds": cpu,
        "build_cpu_over": over("build", cpu),
        "build_peak_bytes": peak,
        "median_cpu_seconds": {name: statistics.median(values) for name, values in cpu.items()},
        "hashing": _hashing(base),
    }


def _hashing(base: Path) -> dict[str, float]:
    """Say what one sha256 of every byte takes of a processor."""
    tree_bytes = sum(path.stat().st_size for path in base.iterdir())
    buffer, hasher = bytes(256 << 10), hashlib.sha256()
    began = time.process_time()
    for _ in range(4096):
        hasher.update(buffer)
    rate = 4096 * len(buffer) / (time.process_time() - began)
    return {
        "sha256_bytes_per_cpu_second": round(rate),
        "sha256_cpu_seconds": round(tree_bytes / rate, 3),
    }


def cpu_seconds() -> float:
    """Return processor seconds of this process and its children so far, user and system."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(who)[:2]) for who in whose)


def over(one: str, measured: dict[str, list[float]]) -> dict[str, float]:
    """Return one contender over each other: the median over the turns of their ratio in a turn.

    What else runs on the machine changes over minutes and so touches all of a turn alike.
    """
    return {
        name: round(statistics.median(a / b for a, b in zip(measured[one], values, strict=True)), 3)
        for name, values in measured.items()
        if name != one
    }


def _quantise(bits: Any, shape: Sequence[int]) -> tuple[Any, Any]:
    from spark_checkpoint.format.numbers import from_bf16_bits, quantise_blocks

    return quantise_blocks(from_bf16_bits(bits).reshape(shape), (128, 128))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())}, {os.cpu_count()} cores"


def command_of(arguments: argparse.Namespace) -> str:
    """Return the command that runs this again, defaults spelt out, for they may change."""
    options = [f"--{name}={value}" for name, value in vars(arguments).items() if name != "command"]
    return shlex.join(["python", "proofs/benchmarks/checkpoint.py", arguments.command, *options])


COMMANDS = {
    "full": bench_full,
    "overlay": lambda arguments: bench_overlay(arguments, _quantise),
    "memory": lambda arguments: bench_memory(arguments, _quantise),
}


def main() -> None:
    """Run one benchmark and write its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("command", choices=sorted(COMMANDS))
    parser.add_argument("--work", type=Path, required=True, help="empty or missing directory")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    origin = describe_run(_processor(), "numpy")  # before the run: the commit that is measured
    load = round(os.getloadavg()[0], 1)
    arguments.work.mkdir(parents=True)
    try:
        result = COMMANDS[arguments.command](arguments)
    finally:
        shutil.rmtree(arguments.work)
    document = {
        "benchmark": f"checkpoint {arguments.command}",
        "command": command_of(arguments),
        **origin,
        "load_1_min": load,
        **result,
    }
    path = RESULTS / f"checkpoint-{arguments.command}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
