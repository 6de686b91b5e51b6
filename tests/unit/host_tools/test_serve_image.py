"""An image taken from its blobs: a real nginx on the loopback address, a docker that pulls."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from spark_contract.documents import text_of
from spark_contract.work.images import LayersPlan
from stub_host import REPOSITORY, Host

LAYER = os.urandom(5 << 20)  # above what nginx reads past the page cache
DOCKER = """#!{python}
import hashlib, json, sys, urllib.request
from pathlib import Path
seen = Path({seen!r})
words = sys.argv[1:]
with seen.open("a") as log:
    print(json.dumps(words), file=log)
image = words[-1]
if words[0] == "pull" and image.startswith("127.0.0.1:"):
    address, _, name = image.partition("/")
    name, _, digest = name.partition("@")
    ask = lambda path: urllib.request.urlopen(f"http://{{address}}/v2/{{path}}", timeout=5)
    assert ask("").status == 200
    manifest = ask(f"{{name}}/manifests/{{digest}}")
    assert manifest.headers["Content-Type"] == {kind!r}, manifest.headers
    for blob in json.load(manifest)["layers"]:
        found = hashlib.sha256(ask(f"{{name}}/blobs/{{blob['digest']}}").read()).hexdigest()
        assert f"sha256:{{found}}" == blob["digest"]
    print(address)
sys.exit({code} if words[0] == "build" else 0)
"""
KIND = "application/vnd.docker.distribution.manifest.v2+json"


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


MANIFEST = json.dumps(
    {"mediaType": KIND, "layers": [{"digest": digest(LAYER), "size": len(LAYER)}]}
).encode()
REFERENCE = f"registry.invalid/lab/engine@{digest(MANIFEST)}"


@pytest.fixture
def place(host: Host, nginx_program: Path) -> Path:
    root = host.paths.root
    (root / "usr/sbin").mkdir(parents=True)
    (root / "usr/sbin/nginx").symlink_to(nginx_program)
    (root / "job/manifests").mkdir(parents=True)
    (root / "job/manifests" / digest(MANIFEST)).write_bytes(MANIFEST)
    (root / "tree").mkdir()
    (root / "tree" / digest(LAYER)).write_bytes(LAYER)
    program = root / "bin/docker"
    program.parent.mkdir()
    program.write_text(
        DOCKER.format(python=sys.executable, seen=str(root / "seen"), kind=KIND, code=7)
    )
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
        [sys.executable, "-m", "spark_host", "image", str(root / "job/layers.json"),
         "docker", "build", "."],
        env={
            "PATH": f"{root}/bin:{os.environ['PATH']}",
            "PYTHONPATH": f"{root}/lib:{REPOSITORY}/files/host:{REPOSITORY}/files/contract",
            "SPARK_ROOT": str(root),
        },
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    seen = [json.loads(line) for line in (root / "seen").read_text().splitlines()]
    return done.returncode, seen, done.stderr


def test_docker_pulls_by_digest_from_this_host_and_then_builds(place: Path) -> None:
    code, seen, _ = run(place, keep=False)
    here, there, removed, built = seen
    assert here[:2] == ["pull", "--quiet"]
    assert here[2].endswith(f"/lab/engine@{digest(MANIFEST)}")
    assert there == ["pull", "--quiet", REFERENCE]
    assert removed == ["image", "rm", here[2]]
    assert (built, code) == (["build", "."], 7)  # the job's own command, and its exit code
    assert not (place / "tree").exists()


def test_blobs_are_kept_where_hosts_that_come_later_shall_find_them(place: Path) -> None:
    run(place, keep=True)
    assert (place / "tree" / digest(LAYER)).read_bytes() == LAYER


def test_without_blobs_docker_is_asked_as_ever(place: Path) -> None:
    code, seen, said = run(place, keep=False, fetches=False)
    assert (code, seen) == (7, [["build", "."]])
    assert "not by way of other hosts" in said
    assert (place / "tree").exists()


def test_a_blob_that_is_not_there_leaves_the_rest_to_docker(place: Path) -> None:
    (place / "tree" / digest(LAYER)).unlink()
    code, seen, said = run(place, keep=True)
    assert [words[0] for words in seen] == ["pull", "build"]
    assert code == 7
    assert "404" in said
