"""What each choice for the shared experts costs in weight error and bytes.

Twice: over normally distributed weights of the 122B's size with a donor made by the builder's own
rule, and over the lab's model, whose donor the lab's own code rounded.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from checkpoint_run import ROOT, run_builder
from checkpoint_sources import Quantise, plan, write_base, write_donor
from checkpoint_trees import Architecture

SCHEMES = ("fp8-donor", "fp8-self", "int8-g128", "keep")


def bench_schemes(arguments: argparse.Namespace, quantise: Quantise) -> dict[str, Any]:
    """Build both models by every scheme, and compare our FP8 with the donor's byte by byte."""
    work: Path = arguments.work
    a = Architecture(layers=4, experts=2, vision_blocks=1, shards=2, vocabulary=1024)
    base, donor, out = work / "base", work / "donor", work / "out"
    write_base(base, a, sparse=True)
    write_donor(donor, a, quantise)
    synthetic = plan(base, out, a, layout="full")
    return {
        "synthetic": {
            **_compare(work, synthetic, donor),
            "note": "donor made by this project's rule from normally distributed weights; real "
            "donors may use another",
        },
        "lab_tiny": {
            **_compare(work, *_lab_sources(work, synthetic)),
            "note": "untrained weights of the lab's model; its donor was rounded by the lab's code",
        },
    }


def _lab_sources(work: Path, like: dict[str, Any]) -> tuple[dict[str, Any], Path]:
    """Have the lab write its repositories; return a plan over them, and the donor."""
    hub = work / "hub"
    command = [sys.executable, "-m", "lab.model", "build", "--untrained", "--out", str(hub)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    trees = {}
    for name in ("lab/tiny-int4", "lab/tiny-fp8"):
        trees[name] = hub / name / (hub / name / "refs/main").read_text().strip()
    tensors = yaml.safe_load((ROOT / "catalog/models/lab-tiny.yml").read_text())["tensors"]
    sets = {
        "swap": tensors["swap"],
        "base_tensors": tensors["base"],
        "mtp_tensors": tensors["mtp"],
        "donor_unmatched": tensors["donor_unmatched"],
        "base": {"dir": str(trees["lab/tiny-int4"]), "revision": None},
    }
    return {**like, **sets}, trees["lab/tiny-fp8"]


def _compare(work: Path, document: dict[str, Any], donor: Path) -> dict[str, Any]:
    out = Path(document["out"])
    rows, own = {}, {}
    for scheme in SCHEMES:
        changed = {**document, "shared_experts": scheme}
        changed["base"] = {**document["base"], "revision": None}
        changed["donor"] = {"dir": str(donor)} if scheme == "fp8-donor" else None
        (work / "plan.json").write_text(json.dumps(changed))
        run_builder("build", str(work / "plan.json"))
        report = json.loads((out / "receipt.json").read_text())["report"]
        own[scheme] = _shared_bytes(out)
        # What replaces nothing reports no error; another scheme without one has not measured it.
        unchanged = {"relative_error_mean": 0} if scheme == "keep" else {}
        rows[scheme] = {
            "bytes": sum(map(len, own[scheme].values())),
            "relative_error_mean": (unchanged or report["shared_experts"])["relative_error_mean"],
        }
        shutil.rmtree(out)
    return {
        "modules": len(own["keep"]),
        "schemes": rows,
        "own_fp8_bytes_equal_to_donor": _equal_part(own["fp8-donor"], own["fp8-self"]),
    }


def _equal_part(one: dict[str, bytes], other: dict[str, bytes]) -> float:
    """Return which part of all bytes is the same in both."""
    pairs = [(data, other[name]) for name, data in one.items()]
    same = sum(x == y for data, theirs in pairs for x, y in zip(data, theirs, strict=True))
    return round(same / sum(len(data) for data, _ in pairs), 6)


def _shared_bytes(directory: Path) -> dict[str, bytes]:
    found = {}
    for shard in directory.glob("*.safetensors"):
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for name, entry in header.items():
                if name.startswith("model.") and ".shared_expert." in name:
                    begin, end = entry["data_offsets"]
                    file.seek(8 + length + begin)
                    found[name] = file.read(end - begin)
    return found
