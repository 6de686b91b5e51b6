"""A host with checkpoints, images and releases of several generations, for pruning."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from spark_contract import files
from spark_contract.status import Pruning
from spark_host.cleanup import prune
from spark_host.records import boot
from stub_host import Host, job_data, release_data

from tests.receipts import checkpoint_receipt, source_receipt

A, B, C, D = (f"main-{digit * 12}" for digit in "abcd")
BASE = "registry/vllm@sha256:" + "b" * 64
RUN = {"schema_version": 1, "state": "done", "exit_code": 0, "started_at": None, "last_lines": []}


def write_json(path: Path, data: Any) -> None:
    files.write_text(path, json.dumps(data))


class Machine:
    def __init__(self, host: Host):
        self.host, self.paths = host, host.paths
        self.units: dict[str, dict[str, str]] = {}
        self.images: dict[str, dict[str, Any]] = {}
        self.removed: list[str] = []

    def folder(self, kind: str, name: str, *, receipt: str = "") -> Path:
        path = self.paths.root / "srv" / kind / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "weights").write_bytes(os.urandom(64 * 1024))
        if receipt:
            (path / "receipt.json").write_text(receipt)
        return path

    def checkpoint(self, name: str, base: Path | None = None) -> Path:
        receipt = checkpoint_receipt(self.on_host(base)) if base else checkpoint_receipt()
        path = self.folder("models", name, receipt=receipt)
        if base:
            os.link(base / "weights", path / "base-weights")
        return path

    def source(self, name: str) -> Path:
        return self.folder("sources", name, receipt=source_receipt())

    def image(self, tag: str, *layers: str, size: int, label: str | None = "f" * 64) -> None:
        pulled = "@" in tag
        self.images[tag] = {
            "RepoTags": None if pulled else [tag],
            "RepoDigests": [tag] if pulled else [],
            "Labels": {"spark.digest": label} if label else None,
            "RootFS": {"Layers": list(layers)},
            "Size": size,
        }

    def good_release(self, name: str, checkpoint: Path, cache: str = "") -> None:
        mounts = [{"source": cache, "target": "/root/.cache", "read_only": False}] if cache else []
        image = "spark-vllm:one"
        release = self.host.release(
            name,
            tree={"path": self.on_host(checkpoint), "digest": "d" * 64},
            image={"tag": image, "digest_label": None, "base": image, "plugin": ""},
            engine={**release_data()["engine"], "mounts": mounts},
        )
        boot.record_known_good(release, self.host.here)

    def job(self, digest12: str, proof: dict[str, str], **changes: Any) -> None:
        write_json(self.paths.job(digest12) / "job.json", job_data(digest12, proof, **changes))
        write_json(self.paths.job(digest12) / "status.json", {**RUN, "started_at": "then"})

    def on_host(self, path: Path) -> str:
        return "/" + str(path.relative_to(self.paths.root))

    def keep(self, releases_kept: int = 1, **changes: Any) -> str:
        request = {
            "releases_kept": releases_kept, "releases": [], "folders": [], "images": [],
            "models_dir": "/srv/models", "sources_dir": "/srv/sources", "cache_dir": "/srv/cache",
        }  # fmt: skip
        return json.dumps({**request, **changes})

    def plan(self, releases_kept: int = 1, **changes: Any) -> Pruning:
        return prune.main(["--dry", self.keep(releases_kept, **changes)], self.paths)

    def prune(self, releases_kept: int = 1) -> Pruning:
        return prune.main([self.keep(releases_kept)], self.paths)

    def used_bytes(self) -> int:
        command = ["du", "-s", "-B1", str(self.paths.root / "srv")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return int(done.stdout.split()[0])


def names(plan: Pruning, kind: str) -> list[str]:
    return [Path(item.name).name for item in plan.items if item.kind == kind]


def add_generations(machine: Machine) -> dict[str, Path]:
    old, new = machine.source("org--old-aaaaaaaaaaaa"), machine.source("org--new-bbbbbbbbbbbb")
    checkpoints = {}
    for letter, base in zip("abcd", (old, old, new, new), strict=True):
        checkpoints[letter] = machine.checkpoint(f"model-{letter * 12}", base)
        machine.good_release(f"main-{letter * 12}", checkpoints[letter])
    machine.image("spark-vllm:one", "l1", "l2", size=300)
    machine.units[f"spark-serve@{D}.service"] = {"ActiveState": "active"}
    return checkpoints
