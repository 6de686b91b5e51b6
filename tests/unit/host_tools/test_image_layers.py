import hashlib
import json
import os
import subprocess
import sys
import urllib.request
from functools import partial

import pytest
from socket_servers import docker_daemon
from spark_contract.documents import to_json
from spark_contract.fetching import LayersPlan
from stub_host import REPOSITORY, write_program

pytestmark = pytest.mark.slow

LAYER = os.urandom(5 << 20)
KIND = "application/vnd.docker.distribution.manifest.v2+json"


def digest(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


MANIFEST = json.dumps(
    {"mediaType": KIND, "layers": [{"digest": digest(LAYER), "size": len(LAYER)}]}
).encode()
REFERENCE = f"registry.invalid/lab/engine@{digest(MANIFEST)}"


@pytest.fixture
def daemon(host):
    with docker_daemon(host.paths.root / "docker.sock") as daemon:
        daemon.script = partial(pull, daemon)
        yield daemon


def pull(daemon, answer, reference):
    address, _, name = reference.partition("/")
    name, _, version = name.partition("@")
    if not address.startswith("127.0.0.1:"):
        daemon.finish(answer, reference)
        return

    def ask(path):
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
def root(nginx_host):
    root = nginx_host.paths.root
    (root / "job/manifests").mkdir(parents=True)
    (root / "job/manifests" / digest(MANIFEST)).write_bytes(MANIFEST)
    (root / "tree").mkdir()
    (root / "tree" / digest(LAYER)).write_bytes(LAYER)
    write_program(root / "bin/docker", f'echo "$*" >> {root}/calls; [ "$1" != build ] || exit 7')
    return root


def run(root, *, keep=False, fetches=True):
    """Run the job's command; return exit code, docker's arguments and errors.

    The blobs are already there; ``fetches`` is whether their fetcher succeeds.
    """
    plan = LayersPlan(
        digest="d" * 64, reference=REFERENCE, plain=False, out=str(root / "tree"), keep=keep
    )
    (root / "job/layers.json").write_text(to_json(plan))
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
    log = root / "calls"
    return done.returncode, log.read_text() if log.exists() else "", done.stderr


BUILT = (7, "build .\n")


@pytest.mark.parametrize("keep", [False, True])
def test_image_is_built_from_local_blobs_after_a_pull(root, daemon, keep):
    code, calls, _ = run(root, keep=keep)
    local, public = daemon.pulled
    assert local.startswith("127.0.0.1:")
    assert local.endswith(f"/lab/engine@{digest(MANIFEST)}")
    assert public == REFERENCE
    assert (code, calls) == (7, f"image rm {local}\nbuild .\n")
    assert (root / "tree" / digest(LAYER)).exists() == keep


def test_image_is_pulled_from_the_registry_if_no_local_blobs_exist(root, daemon):
    *result, errors = run(root, fetches=False)
    assert (tuple(result), daemon.pulled) == (BUILT, [REFERENCE])
    assert "cannot be pulled from other hosts" in errors
    assert (root / "tree").exists()


def test_image_comes_from_the_registry_if_a_local_blob_is_missing(root, daemon):
    (root / "tree" / digest(LAYER)).unlink()
    *result, errors = run(root, keep=True)
    assert (tuple(result), daemon.pulled[-1]) == (BUILT, REFERENCE)
    assert "404" in errors


def test_existing_image_is_not_pulled(root, daemon):
    daemon.images.add(REFERENCE)
    *result, _ = run(root, fetches=False)
    assert (tuple(result), daemon.pulled) == (BUILT, [])


def test_failed_pull_builds_nothing(root, daemon):
    daemon.script = lambda answer, reference: answer.send({"error": "no such host"})
    code, calls, errors = run(root, fetches=False)
    assert (code, calls) == (1, "")
    assert f"error: {REFERENCE}: docker cannot pull the image: no such host; fix: " in errors
