"""Peak memory of a build while the tree grows: in bytes, in names, and to the largest model."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint_run import run_builder
from checkpoint_sources import Quantise, plan, write_base, write_donor
from checkpoint_trees import Architecture, base_entries, mtp, size_of

ONE = Architecture(layers=4, experts=16, vocabulary=8192, vision_blocks=2, shards=4, donor_shards=4)
# Twice the rows and twice the columns: the same names, four times the bytes.
WIDER = replace(ONE, hidden=2 * ONE.hidden, width=2 * ONE.width)
# The same tensors, four times as many.
LONGER = replace(ONE, layers=16, shards=16, donor_shards=16)
LARGEST = Architecture(
    layers=60, experts=512, hidden=4096, width=1024, gdn_rows=12288, shards=40, donor_shards=94
)
LIMIT_BYTES = 256 << 20


def bench_memory(arguments: argparse.Namespace, quantise: Quantise) -> dict[str, Any]:
    """Build trees of growing size in both layouts and report the peak of each."""
    work: Path = arguments.work
    trees: dict[str, tuple[Architecture, tuple[str, ...]]] = {
        "one": (ONE, ("full", "overlay")),
        "four_times_the_bytes": (WIDER, ("full", "overlay")),
        "four_times_the_names": (LONGER, ("full", "overlay")),
        "122b_real_size": (Architecture(), ("overlay",)),
        "397b_real_size": (LARGEST, ("overlay",)),
    }
    rows = {
        name: _row(work, architecture, layouts, quantise)
        for name, (architecture, layouts) in trees.items()
    }
    peaks = [row["peak_bytes"][layout] for row in rows.values() for layout in row["peak_bytes"]]
    return {
        "trees": rows,
        "four_times_the_bytes_over_one": _growth(rows, "four_times_the_bytes"),
        "four_times_the_names_over_one": _growth(rows, "four_times_the_names"),
        "largest_peak_bytes": max(peaks),
        "limit_bytes": LIMIT_BYTES,
        "within_limit": max(peaks) <= LIMIT_BYTES,
    }


def _growth(rows: dict[str, dict[str, Any]], grown: str) -> dict[str, float]:
    one, other = rows["one"]["peak_bytes"], rows[grown]["peak_bytes"]
    return {layout: round(other[layout] / one[layout], 3) for layout in one}


def _row(
    work: Path, a: Architecture, layouts: tuple[str, ...], quantise: Quantise
) -> dict[str, Any]:
    base, donor = work / "base", work / "donor"
    # Holes read like zeros: what is not looked at needs no disk, but full copies need its hashes.
    write_base(base, a, sparse="full" not in layouts)
    write_donor(donor, a, quantise)
    entries = base_entries(a) + mtp(a)
    peaks = {layout: _build(work, a, layout)["peak_bytes"] for layout in layouts}
    largest = max(path.stat().st_size for path in base.glob("*.safetensors"))
    for directory in (base, donor):
        shutil.rmtree(directory)
    return {
        "tree_bytes": sum(map(size_of, entries)),
        "largest_shard_bytes": largest,
        "tensors": len(entries),
        "peak_bytes": peaks,
    }


def _build(work: Path, a: Architecture, layout: str) -> dict[str, Any]:
    base, out = work / "base", work / "out"
    document = plan(base, out, a, layout=layout, donor={"dir": str(work / "donor")})
    (work / "plan.json").write_text(json.dumps(document))
    done = run_builder("build", str(work / "plan.json"))
    shutil.rmtree(out)
    return done
