import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from spark_contract.builder_api import expand_all

from lab.hub.server import running
from proofs.releases import trees
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.catalog.model import HybridModel, PlainModel
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.settings.sources import HubSettings
from spark_deploy.lock import hub as hubs
from spark_deploy.lock.headers import read_metadata
from spark_deploy.lock.resolve import write_lock
from spark_deploy.lock.types import EMPTY_LOCK, Lock
from spark_deploy.plan.speed import compute_speed, step_reads

HERE = Path(__file__).parent / "inventory"
PAIR = 'cluster.hosts=["spark-1","spark-2"]'
PLANS = {
    "cluster-overlay": ["--model", "qwen3.5-122b", "--profile", "v2", "--data", PAIR],
    "cluster-full": [
        *("--model", "qwen3.5-122b", "--profile", "v2", "--data", PAIR),
        *("--data", "checkpoint.layout=full"),
    ],
    "plain-fp8": ["--model", "tiny-fp8", "--profile", "plain-mtp2"],
    "plain-bf16": ["--model", "tiny-bf16", "--profile", "plain-mtp2"],
    "published-bf16": ["--model", "tiny-bf16", "--profile", "plain"],
    "plain-ngram": ["--model", "tiny-bf16", "--profile", "plain-ngram"],
    "flash-nvme": ["--model", "qwen3.8-flash-next", "--profile", "flash-nvme"],
    "container": ["--model", "tiny", "--profile", "v2"],
    "seeing": ["--model", "tiny", "--profile", "v2-seeing"],
}
SLICED, SLICE = "qwen3.5-122b", "qwen3.5-122b-slice"
SLICE_LAYERS = 8
WHOLE_CONTEXT_TOKENS = 1024
WHOLE_CACHE_GIB = 16
"""The same on every GPU, so that the engine's capacity can be compared with the plan's."""
WHOLE = (
    ("qwen3.5-35b", "base", 0),
    ("qwen3.5-35b", "v2", 0),
    ("qwen3.5-35b", "v2", 2),
    (SLICE, "base", 0),
    (SLICE, "v2", 0),
    (SLICE, "agent", 2),
)
"""Model, profile and drafts of each engine of ``proofs.whole``, in the order to run."""


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "inventory"
        shutil.copytree(HERE, site)
        write_lock(site / "spark.lock.yml", make_lock(Path(folder) / "hub"))
        for name, chosen in PLANS.items():
            (out / f"{name}.json").write_text(run_plan(site / "two.py", chosen))
        (site / f"catalog/models/{SLICE}.yml").write_text(yaml.safe_dump(slice_model()))
        engines = [plan_whole(site, *engine) for engine in WHOLE]
        (out / "whole.json").write_text(json.dumps(engines))


def make_lock(store: Path) -> Lock:
    for name in ("fp8", "bf16"):
        trees.publish_plain(store, name)
    catalog = read_catalog(user_dir=HERE)
    models = [catalog.model(f"tiny-{name}") for name in ("fp8", "bf16")]
    plain = [model for model in models if isinstance(model, PlainModel)]
    with running(store, store) as address:
        own = HubSettings(endpoint=address)
        sources = [
            hubs.look_up_repo(own.endpoint, model.repository, "main", None) for model in plain
        ]
        repo_metadata = [
            read_metadata(m.repository, s.commit, own) for m, s in zip(plain, sources, strict=True)
        ]
    return EMPTY_LOCK.with_entries(sources, repo_metadata=repo_metadata)


def run_plan(inventory: Path, chosen: list[str]) -> str:
    arguments = ["plan", "spark-1", "--inventory", str(inventory), "--estimate", "--json", *chosen]
    command = [sys.executable, "-m", "spark_deploy", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def slice_model() -> dict[str, Any]:
    """Return the catalog file of the 122B with its first layers only."""
    text = (CHECKOUT / f"catalog/models/{SLICED}.yml").read_text()
    ranges = re.compile(r"(?<= model\.language_model\.layers\.\{)(\d+)\.\.\d+(\.\.4)?(?=\})")

    def shorten(match: re.Match[str]) -> str:
        first, step = int(match[1]), match[2] or ""
        return f"{first}..{first + SLICE_LAYERS - 4 if step else SLICE_LAYERS - 1}{step}"

    model: dict[str, Any] = yaml.safe_load(ranges.sub(shorten, text))
    model["architecture"]["layers"] = SLICE_LAYERS
    tensors = model["tensors"]
    for kind in ("base", "swap", "donor_unmatched"):
        tensors["counts"][kind] = len(expand_all(tensors[kind]))
    return model


def plan_whole(site: Path, name: str, profile_name: str, drafts: int) -> dict[str, Any]:
    """Return what the plan computes for an engine, and the files that it reads."""
    chosen = ["--model", name, "--profile", profile_name]
    for setting in (f"drafts={drafts}", f"kv_cache_gib={WHOLE_CACHE_GIB}"):
        chosen += ["--data", f"engine.{setting}"]
    [plan] = json.loads(run_plan(site / "two.py", chosen))
    catalog = read_catalog(user_dir=site)
    model = catalog.model(name)
    assert isinstance(model, HybridModel)
    shape, profile = model.architecture, catalog.profile(profile_name, name)
    profile = profile if drafts else dataclasses.replace(profile, speculation=None)
    reads = list(step_reads(shape, profile, drafts, context_tokens=WHOLE_CONTEXT_TOKENS))
    speed = compute_speed(shape, profile, context_tokens=WHOLE_CONTEXT_TOKENS)
    return {
        "name": f"{name}-{profile_name}{'-drafts' if drafts else ''}",
        "model": name,
        "profile": profile_name,
        "drafts": drafts,
        "architecture": dataclasses.asdict(shape),
        "argv": plan["release"]["engine"]["argv"],
        "memory": plan["memory"],
        "disk_bytes": sum(
            entry["after_bytes"]
            for entry in plan["disk"]
            if Path(entry["path"]).parent.name in ("models", "sources")
        ),
        "build": plan["checkpoint"] and plan["checkpoint"]["build"],
        "read_bytes": {cause: round(size_bytes) for cause, size_bytes, _ in reads},
        "spark_step_s": speed.step_s,
    }


if __name__ == "__main__":
    main()
