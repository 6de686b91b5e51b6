"""Measures the checkpoint builder: time against copying, memory, planning, bytes on the wire.

    python proofs/benchmarks/checkpoint.py full --work /var/tmp/bench --gigabytes 4 --pairs 5
    python proofs/benchmarks/checkpoint.py overlay --work /var/tmp/bench
    python proofs/benchmarks/checkpoint.py head --work /var/tmp/bench
    python proofs/benchmarks/checkpoint.py schemes --work /var/tmp/bench
    python proofs/benchmarks/checkpoint.py memory --work /var/tmp/bench
    python proofs/benchmarks/checkpoint.py fetch --work /var/tmp/bench --gigabytes 2

Needs Linux, numpy and room under --work (full: three times the tree). Each command writes its
result to proofs/results/checkpoint-<command>.json, which says where and at which commit it was
measured.
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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT / home) for home in ("files/contract", "files/checkpoint", "proofs/benchmarks")
]

from checkpoint_fetch import bench_fetch  # noqa: E402
from checkpoint_memory import bench_memory  # noqa: E402
from checkpoint_overlay import bench_overlay  # noqa: E402
from checkpoint_run import forget, run_builder  # noqa: E402
from checkpoint_schemes import bench_schemes  # noqa: E402
from checkpoint_sources import plan, write_base, write_donor  # noqa: E402
from checkpoint_trees import Architecture, base_entries, mtp, size_of  # noqa: E402

RESULTS = ROOT / "proofs/results"
REAL = Architecture()


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


def bench_head(arguments: argparse.Namespace) -> dict[str, Any]:
    """The INT8 head at the real vocabulary, over normally distributed weights."""
    import numpy as np
    from checkpoint_trees import write_shard

    work: Path = arguments.work
    base, out = work / "base", work / "out"
    tiny = Architecture(
        layers=4, experts=2, hidden=3072, width=128, vision_blocks=1, shards=2, vocabulary=64
    )
    write_base(base, tiny, sparse=True)
    random = np.random.default_rng(3)
    rows, columns = REAL.vocabulary, REAL.hidden
    shape = (rows, columns)
    extra = base / "model_head.safetensors"
    write_shard(extra, [("lm_head.weight", "BF16", shape)], {}, None)
    with extra.open("r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        for _ in range(0, rows, 4096):
            values = random.standard_normal((min(4096, rows), columns), np.float32) * 0.02
            file.write((values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes())
        file.truncate(extra.stat().st_size)
    return _measure_head(base, out, tiny, extra, work)


def _measure_head(
    base: Path, out: Path, tiny: Architecture, extra: Path, work: Path
) -> dict[str, Any]:
    from checkpoint_sources import write_receipt

    index_path = base / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    length = int.from_bytes(extra.read_bytes()[:8], "little")
    os.truncate(extra, 8 + length + REAL.vocabulary * REAL.hidden * 2)
    index["weight_map"]["lm_head.weight"] = extra.name
    index_path.write_text(json.dumps(index))
    for shard in base.glob("model-*.safetensors"):
        _drop_tensor(shard, "lm_head.weight")
    write_receipt(base, hashed=False)
    document = plan(base, out, tiny, head="int8-g128", shared_experts="keep", donor_unmatched=[])
    (work / "plan.json").write_text(json.dumps(document))
    run = run_builder("build", str(work / "plan.json"))
    report = json.loads((out / "receipt.json").read_text())["report"]
    return {
        "head_shape": [REAL.vocabulary, REAL.hidden],
        "seconds": round(run["seconds"], 2),
        "cpu_seconds": round(run["cpu_seconds"], 2),
        "peak_bytes": run["peak_bytes"],
        **report["head"],
    }


def _drop_tensor(shard: Path, name: str) -> None:
    """Remove the last tensor of a shard by cutting the file and its header."""
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if name not in header:
        return
    entry = header.pop(name)
    raw = json.dumps(header, separators=(",", ":")).encode()
    body = data[8 + length : 8 + length + entry["data_offsets"][0]]
    shard.write_bytes(len(raw).to_bytes(8, "little") + raw + body)


def _quantise(bits: Any, shape: Sequence[int]) -> tuple[Any, Any]:
    from spark_checkpoint.format.numbers import from_bf16_bits, quantise_blocks

    return quantise_blocks(from_bf16_bits(bits).reshape(shape), (128, 128))


def machine() -> dict[str, Any]:
    """Describe where this was measured."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")),
        platform.machine(),
    )  # fmt: skip
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_1_min": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }


def source() -> dict[str, Any]:
    """Say what was measured: the commit, and which of its files are others here."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    changed = git("diff", "--name-only", "HEAD", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
    return {"commit": git("rev-parse", "HEAD").strip(), "changed_files": changed.splitlines()}


def command_of(arguments: argparse.Namespace) -> str:
    """Return the command that runs this again, defaults spelt out, for they may change."""
    options = [f"--{name}={value}" for name, value in vars(arguments).items() if name != "command"]
    return shlex.join(["python", "proofs/benchmarks/checkpoint.py", arguments.command, *options])


COMMANDS = {
    "full": bench_full,
    "overlay": lambda arguments: bench_overlay(arguments, _quantise),
    "head": bench_head,
    "schemes": lambda arguments: bench_schemes(arguments, _quantise),
    "fetch": bench_fetch,
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
    # Before the run: a commit made meanwhile was not measured.
    measured = source()
    arguments.work.mkdir(parents=True)
    try:
        result = COMMANDS[arguments.command](arguments)
    finally:
        shutil.rmtree(arguments.work)
    document = {
        "benchmark": f"checkpoint {arguments.command}",
        "command": command_of(arguments),
        "measured_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine(),
        "source": measured,
        **result,
    }
    path = RESULTS / f"checkpoint-{arguments.command}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
