"""A host with trees, images and releases of several generations, for pruning."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from spark_contract import files
from spark_contract.status import Pruning
from spark_host.cleanup import prune
from spark_host.records import boot
from stub_host import Host

from tests.receipts import checkpoint_receipt, source_receipt

A, B, C, D = (f"main-{digit * 12}" for digit in "abcd")
BASE = "registry/vllm@sha256:" + "b" * 64


# As the tools wrote it before it was a document of the contract.
RUN = {"schema_version": 1, "state": "done", "exit_code": 0, "started_at": None, "last_lines": []}


def put(path: Path, data: Any) -> None:
    files.write_text(path, json.dumps(data))


class Machine:
    """A host with trees, images and releases of several generations."""

    def __init__(self, host: Host):
        self.host, self.paths = host, host.paths
        self.units: dict[str, dict[str, str]] = {}
        self.images: dict[str, dict[str, Any]] = {}
        self.removed: list[str] = []

    def folder(self, kind: str, name: str, *, kilobytes: int = 64, receipt: str = "") -> Path:
        path = self.paths.root / "srv" / kind / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "weights").write_bytes(os.urandom(kilobytes * 1024))
        if receipt:
            (path / "receipt.json").write_text(receipt)
        return path

    def tree(self, name: str, base: Path | None = None) -> Path:
        receipt = checkpoint_receipt(self.shown(base)) if base else checkpoint_receipt()
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

    def good(self, name: str, tree: Path, image: str = "spark-vllm:one", cache: str = "") -> None:
        mounts = [{"source": cache, "target": "/root/.cache", "read_only": False}] if cache else []
        release = self.host.release(
            name,
            tree={"path": self.shown(tree), "digest": "d" * 64},
            image={"tag": image, "digest_label": None, "base": image, "plugin": ""},
            engine={
                "user": "root",
                "max_sequences": 1,
                "kv_cache_bytes": None,
                "argv": ["/model"],
                "env": {},
                "mounts": mounts,
                "docker_args": [],
            },
        )
        boot.record_good(release, self.host.here)

    def job(
        self, digest12: str, proof: dict[str, str], *words: str, kind: str = "fetch", **more: str
    ) -> None:
        data = {
            "schema_version": 1, "digest": digest12.ljust(64, "0"), "kind": kind,
            "title": digest12, "argv": ["true", *words], "env": {}, "proof": proof,
            "total_bytes": None, "after": [], **more,
        }  # fmt: skip
        put(self.paths.job(digest12) / "job.json", data)
        files.write_text(
            self.paths.job(digest12) / "status.json", json.dumps({**RUN, "started_at": "then"})
        )

    def shown(self, path: Path) -> str:
        """Return a path as release and plan write it, without the root of this test."""
        return "/" + str(path.relative_to(self.paths.root))

    def keep(self, kept: int = 1, **more: Any) -> str:
        wishes = {
            "releases_kept": kept, "releases": [], "folders": [], "images": [],
            "models_dir": "/srv/models", "sources_dir": "/srv/sources", "cache_dir": "/srv/cache",
        }  # fmt: skip
        return json.dumps({**wishes, **more})

    def look(self, kept: int = 1, **more: Any) -> Pruning:
        return prune.plan_prune(prune.read_keep(self.keep(kept, **more)), self.paths).document()

    def prune(self, kept: int = 1, **more: Any) -> Pruning:
        return prune.main([self.keep(kept, **more)], self.paths)

    def used_bytes(self) -> int:
        said = subprocess.run(
            ["du", "-s", "-B1", str(self.paths.root / "srv")],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return int(said.stdout.split()[0])


def names(found: Pruning, kind: str) -> list[str]:
    return [Path(item.name).name for item in found.items if item.kind == kind]


def generations(machine: Machine) -> dict[str, Path]:
    """Have four releases with a tree each, from two sources; D serves."""
    old, new = machine.source("org--old-aaaaaaaaaaaa"), machine.source("org--new-bbbbbbbbbbbb")
    trees = {}
    for letter, base in zip("abcd", (old, old, new, new), strict=True):
        trees[letter] = machine.tree(f"model-{letter * 12}", base)
        machine.good(f"main-{letter * 12}", trees[letter])
    machine.image("spark-vllm:one", "l1", "l2", size=300)
    machine.units[f"spark-serve@{D}.service"] = {"ActiveState": "active"}
    return trees
