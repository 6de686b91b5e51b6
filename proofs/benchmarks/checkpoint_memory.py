"""Peak memory of a build while the tree grows: in bytes, in names, and to the largest model."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint_hub import serve
from checkpoint_run import run_builder
from checkpoint_sources import Quantise, plan, write_base, write_donor
from checkpoint_trees import DONOR_COMMIT, Architecture, base_entries, mtp, size_of

ONE = Architecture(layers=4, experts=16, vocabulary=8192, vision_blocks=2, shards=4, donor_shards=4)
# As many files of four times the size in all: what is no routed expert does not grow.
GROWN = replace(ONE, experts=7 * ONE.experts)
# The same names, each with four times the bytes: rows twice as long, twice as many.
WIDER = replace(ONE, hidden=2 * ONE.hidden, width=2 * ONE.width)
LARGEST = Architecture(layers=60, experts=512, hidden=4096, shards=40, donor_shards=94)
# What is built: a name for the result file, and what differs from an overlay that keeps the head.
BOTH: dict[str, dict[str, str]] = {"full": {"layout": "full"}, "overlay": {}}
ALL: dict[str, dict[str, str]] = {
    "overlay": {},
    "overlay_int8_head": {"head": "int8-g128"},
    "full_int8_head": {"layout": "full", "head": "int8-g128"},
}
# A Spark's: more workers take more memory.
CORES = 20
LIMIT_BYTES = 256 << 20
REPOSITORY = f"bench/donor/resolve/{DONOR_COMMIT}"


def bench_memory(arguments: argparse.Namespace, quantise: Quantise) -> dict[str, Any]:
    """Build trees of growing size in both layouts and report the peak of each."""
    work: Path = arguments.work
    trees = {
        "one": (ONE, BOTH),
        "four_times_the_tree": (GROWN, BOTH),
        "four_times_the_bytes_per_tensor": (WIDER, BOTH),
        "397b_real_size": (LARGEST, ALL),
    }
    rows = {
        name: _row(work, architecture, builds, quantise)
        for name, (architecture, builds) in trees.items()
    }
    peaks = [peak for row in rows.values() for peak in row["peak_bytes"].values()]
    return {
        "trees": rows,
        "four_times_the_tree_over_one": _growth(rows, "four_times_the_tree"),
        "four_times_the_bytes_per_tensor_over_one": _growth(
            rows, "four_times_the_bytes_per_tensor"
        ),
        "largest_peak_bytes": max(peaks),
        "workers_as_on_cores": CORES,
        "limit_bytes": LIMIT_BYTES,
        "within_limit": max(peaks) <= LIMIT_BYTES,
    }


def _growth(rows: dict[str, dict[str, Any]], grown: str) -> dict[str, float]:
    one, other = rows["one"]["peak_bytes"], rows[grown]["peak_bytes"]
    return {layout: round(other[layout] / one[layout], 3) for layout in one}


def _row(
    work: Path, a: Architecture, builds: dict[str, dict[str, str]], quantise: Quantise
) -> dict[str, Any]:
    base, donor = work / "base", work / "hub" / REPOSITORY
    # Holes read like zeros: what is not looked at needs no disk. Small trees have real bytes.
    sparse = a is LARGEST
    write_base(base, a, sparse=sparse)
    write_donor(donor, a, quantise)
    entries = base_entries(a) + mtp(a)
    done = {name: _build(work, a, changes, holes=sparse) for name, changes in builds.items()}
    largest = max(path.stat().st_size for path in base.glob("*.safetensors"))
    shutil.rmtree(base)
    shutil.rmtree(work / "hub")
    return {
        "tree_bytes": sum(map(size_of, entries)),
        "largest_shard_bytes": largest,
        "tensors": len(entries),
        "peak_bytes": {name: run["peak_bytes"] for name, run in done.items()},
        "seconds": {name: round(run["seconds"], 1) for name, run in done.items()},
        "cpu_seconds": {name: round(run["cpu_seconds"], 1) for name, run in done.items()},
    }


def _build(work: Path, a: Architecture, changes: dict[str, str], *, holes: bool) -> dict[str, Any]:
    base, out = work / "base", work / "out"
    with serve(work / "hub") as url:
        donor = {"url": f"{url}/{REPOSITORY}", "parallel": 8}
        document = plan(base, out, a, donor=donor, **changes)
        (work / "plan.json").write_text(json.dumps(document))
        done = run_builder("build", str(work / "plan.json"), cores=CORES, holes=holes)
    shutil.rmtree(out)
    return done
