"""An image from local blobs: a real nginx and a docker that pulls."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from docker_daemon import Answer, Daemon, listening
from spark_contract.documents import text_of
from spark_contract.fetching import LayersPlan
from stub_host import REPOSITORY, Host

LAYER = os.urandom(5 << 20)  # above the limit of nginx's direct I/O
DOCKER = """#!{python}
import json, sys
with open({seen!r}, "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
sys.exit(7 if sys.argv[1] == "build" else 0)
"""
KIND = "application/vnd.docker.distribution.manifest.v2+json"


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


MANIFEST = json.dumps(
    {"mediaType": KIND, "layers": [{"digest": digest(LAYER), "size": len(LAYER)}]}
).encode()
REFERENCE = f"registry.invalid/lab/engine@{digest(MANIFEST)}"


@pytest.fixture
def daemon(host: Host) -> Iterator[Daemon]:
    with listening(host.paths.root / "docker.sock") as made:
        made.script = partial(pulls, made)
        yield made


def pulls(daemon: Daemon, answer: Answer, reference: str) -> None:
    address, _, name = reference.partition("/")
    name, _, version = name.partition("@")
    if not address.startswith("127.0.0.1:"):
        daemon.finish(answer, reference)
        return

    def ask(path: str) -> Any:
        return urllib.request.urlopen(f"http://{address}/v2/{path}", timeout=5)

    try:
        assert ask("").status == 200
        manifest = ask(f"{name}/manifests/{version}")
        assert manifest.headers["Content-Type"] == KIND
        for blob in json.load(manifest)["layers"]:
            assert digest(ask(f"{name}/blobs/{blob['digest']}").read()) == blob["digest"]
    except OSError as error:
        answer.send({"error": str(error)})
    daemon.finish(answer, reference)


@pytest.fixture
def place(nginx_host: Host) -> Path:
    root = nginx_host.paths.root
    (root / "job/manifests").mkdir(parents=True)
    (root / "job/manifests" / digest(MANIFEST)).write_bytes(MANIFEST)
    (root / "tree").mkdir()
    (root / "tree" / digest(LAYER)).write_bytes(LAYER)
    program = root / "bin/docker"
    program.parent.mkdir()
    program.write_text(DOCKER.format(python=sys.executable, seen=str(root / "seen")))
    program.chmod(0o755)
    return root


def run(root: Path, *, keep: bool, fetches: bool = True) -> tuple[int, list[list[str]], str]:
    """Run the job's command; the blobs are there already, or their fetcher fails."""
    plan = LayersPlan(
        digest="d" * 64, reference=REFERENCE, plain=False, out=str(root / "tree"), keep=keep
    )
    (root / "job/layers.json").write_text(text_of(plan))
    fetcher = root / "lib/spark_checkpoint"
    fetcher.mkdir(parents=True, exist_ok=True)
    (fetcher / "__main__.py").write_text(f"raise SystemExit({0 if fetches else 4})\n")
    done = subprocess.run(
        [sys.executable, "-m", "spark_host", "image", "--layers", str(root / "job/layers.json"),
         REFERENCE, "docker", "build", "."],
        env={
            "PATH": f"{root}/bin:{os.environ['PATH']}",
            "PYTHONPATH": f"{root}/lib:{REPOSITORY}/files/host:{REPOSITORY}/files/contract",
            "SPARK_ROOT": str(root),
            "SPARK_DOCKER_SOCKET": str(root / "docker.sock"),
        },
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    lines = (root / "seen").read_text().splitlines() if (root / "seen").exists() else []
    seen = [json.loads(line) for line in lines]
    return done.returncode, seen, done.stderr


def test_pulls_from_local_blobs_then_builds(place: Path, daemon: Daemon) -> None:
    code, seen, _ = run(place, keep=False)
    here, there = daemon.pulled
    assert here.startswith("127.0.0.1:")
    assert here.endswith(f"/lab/engine@{digest(MANIFEST)}")
    assert there == REFERENCE
    # The command of the job, and the exit code.
    assert (seen, code) == ([["image", "rm", here], ["build", "."]], 7)
    assert not (place / "tree").exists()


def test_keeps_blobs_for_other_hosts(place: Path, daemon: Daemon) -> None:
    run(place, keep=True)
    assert (place / "tree" / digest(LAYER)).read_bytes() == LAYER


def test_pulls_from_the_registry_without_blobs(place: Path, daemon: Daemon) -> None:
    code, seen, said = run(place, keep=False, fetches=False)
    assert (code, seen, daemon.pulled) == (7, [["build", "."]], [REFERENCE])
    assert "not pulled from other hosts" in said
    assert (place / "tree").exists()


def test_missing_blob_falls_back_to_the_registry(place: Path, daemon: Daemon) -> None:
    (place / "tree" / digest(LAYER)).unlink()
    code, seen, said = run(place, keep=True)
    assert daemon.pulled[-1] == REFERENCE
    assert (code, seen) == (7, [["build", "."]])
    assert "404" in said


def test_existing_image_is_not_pulled(place: Path, daemon: Daemon) -> None:
    daemon.images.add(REFERENCE)
    code, seen, _ = run(place, keep=False, fetches=False)
    assert (code, seen, daemon.pulled) == (7, [["build", "."]], [])


def test_failed_pull_builds_nothing(place: Path, daemon: Daemon) -> None:
    daemon.script = lambda answer, reference: answer.send({"error": "no such host"})
    code, seen, said = run(place, keep=False, fetches=False)
    assert (code, seen) == (1, [])
    assert f"error: {REFERENCE}: docker cannot pull it: no such host; fix: " in said
