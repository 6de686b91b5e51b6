"""Overlays of the 122B's real size: seconds, planning, quick verify, bytes on the wire.

Tensors nobody looks at are holes, so the trees take little disk; names, shapes, headers, shared
experts and ranges are of the real size. The donor is read over HTTP by ranges.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint_hub import serve
from checkpoint_run import run_builder
from checkpoint_sources import Quantise, plan, write_base, write_donor
from checkpoint_trees import DONOR_COMMIT, Architecture, base_entries, mtp, write_shard

REAL = Architecture()
# The same names and swapped weights; the routed experts, which an overlay only links, grow.
FOURFOLD = replace(REAL, routed_width=9 * REAL.width // 2)
# More names than the 122B has: planning must not depend on fitting it closely.
PLANNED_NAMES = 120_000
REPOSITORY = f"bench/donor/resolve/{DONOR_COMMIT}"
SWAP_BYTES = 144 * (1024 * 3072 + 384)


def bench_overlay(arguments: argparse.Namespace, quantise: Quantise) -> dict[str, Any]:
    """Build overlays: of the real tree, of one four times as large, and with the packed head."""
    work: Path = arguments.work
    repository = work / "hub" / REPOSITORY
    write_donor(repository, REAL, quantise)
    write_base(work / "base", REAL, sparse=True)
    with serve(work / "hub") as url:
        donor = {"url": f"{url}/{REPOSITORY}", "parallel": 8}
        real, document = _overlays(work, REAL, donor, arguments.pairs)
        packed, _ = _overlays(work, REAL, donor, 1, head="int8-g128")
        padded = _padded(work / "base", document)
        planning = [_planning_seconds(work / "base", padded) for _ in range(5)]
        shutil.rmtree(work / "base")
        write_base(work / "base", FOURFOLD, sparse=True)
        large, _ = _overlays(work, FOURFOLD, donor, arguments.pairs)
    headers = sum(_header_bytes(path) for path in repository.glob("*.safetensors"))
    index = (repository / "model.safetensors.index.json").stat().st_size
    for tree in (real, packed, large):
        if tree["donor_received_bytes"] - index > SWAP_BYTES + headers:
            raise SystemExit("more than swapped tensors and headers came over the network")
    return {
        "planning_names": PLANNED_NAMES,
        "planning_cpu_seconds": planning,
        "planning_median_cpu_seconds": statistics.median(planning),
        "swapped": 144,
        "donor_unmatched": len(document["donor_unmatched"]),
        "donor_swap_bytes": SWAP_BYTES,
        "donor_header_bytes": headers,
        "donor_swap_and_header_bytes": SWAP_BYTES + headers,
        "donor_index_bytes": index,
        "trees": {
            "122b": real,
            "122b_int8_head": packed,
            "122b_routed_experts_4.5_times_as_wide": large,
        },
        "larger_over_real": {
            "apparent_bytes": round(large["base_apparent_bytes"] / real["base_apparent_bytes"], 2),
            "build_seconds": round(large["build_median_seconds"] / real["build_median_seconds"], 2),
        },
        "note": "the head is zeros, which take as long to pack as other values",
    }


def _overlays(
    work: Path, a: Architecture, donor: dict[str, Any], turns: int, **changes: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Build and verify an overlay some times; return what was measured, and its plan."""
    base, out = work / "base", work / "out"
    document = plan(base, out, a, donor=donor, **changes)
    (work / "plan.json").write_text(json.dumps(document))
    builds, verifies = [], []
    for _ in range(turns):
        builds.append(run_builder("build", str(work / "plan.json")))
        verifies.append(run_builder("verify", "--quick", str(out)))
        receipt = json.loads((out / "receipt.json").read_text())
        shutil.rmtree(out)
    measured = {
        "base_apparent_bytes": sum(path.stat().st_size for path in base.iterdir()),
        "base_tensors": len(base_entries(a)) + len(mtp(a)),
        "result_tensors": receipt["tensors"],
        "donor_received_bytes": receipt["report"]["donor_received_bytes"],
        "written_bytes": receipt["report"]["written_bytes"],
    }
    return measured | _summary("build", builds) | _summary("verify_quick", verifies), document


def _summary(what: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [round(run["seconds"], 2) for run in runs]
    return {
        f"{what}_seconds": seconds,
        f"{what}_median_seconds": round(statistics.median(seconds), 2),
        f"{what}_cpu_seconds": [round(run["cpu_seconds"], 2) for run in runs],
        f"{what}_peak_bytes": max(run["peak_bytes"] for run in runs),
    }


def _header_bytes(shard: Path) -> int:
    with shard.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _padded(base: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Give the base small tensors in one more shard up to so many names, and return their plan."""
    index_path = base / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    count = PLANNED_NAMES - len(index["weight_map"])
    names = [f"model.language_model.padding.{number}.weight" for number in range(count)]
    shard = base / "model-padding.safetensors"
    write_shard(shard, [(name, "BF16", (1,)) for name in names], {}, None)
    index["weight_map"].update(dict.fromkeys(names, shard.name))
    index_path.write_text(json.dumps(index))
    pattern = f"model.language_model.padding.{{0..{count - 1}}}.weight"
    return {**document, "base_tensors": [*document["base_tensors"], pattern]}


def _planning_seconds(base: Path, document: dict[str, Any]) -> float:
    """Read and check every header and index, and compare the exact sets, on one core."""
    from spark_checkpoint.format.tree import read_tree
    from spark_contract.work.patterns import expand_all

    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    began = time.process_time()
    found = set(read_tree(base).owner)
    expected = expand_all(document["base_tensors"]) | expand_all(document["mtp_tensors"])
    seconds = time.process_time() - began
    os.sched_setaffinity(0, everywhere)
    if found != expected:
        raise SystemExit("the synthetic base is not what its plan says")
    return round(seconds, 3)
