"""Container images made without a container engine."""

import gzip
import hashlib
import json
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from lab.errors import LabError
from lab.images import (
    ImageConfig,
    config_bytes,
    layer_from_files,
    layer_from_tar,
    layer_from_tree,
    manifest_bytes,
    push_image,
)


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "bin").mkdir(parents=True)
    (root / "bin/tool").write_text("#!/bin/sh\n")
    (root / "bin/tool").chmod(0o755)
    (root / "bin/alias").symlink_to("tool")
    return root


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_equal_trees_give_equal_layers_whatever_their_times(tree, tmp_path):
    one = layer_from_tree(tree, tmp_path / "one.tar.gz")
    (tree / "bin/tool").touch()
    two = layer_from_tree(tree, tmp_path / "two.tar.gz")
    assert one.digest == two.digest
    (tree / "bin/tool").write_text("#!/bin/bash\n")
    assert layer_from_tree(tree, tmp_path / "three.tar.gz").digest != one.digest


def test_a_layer_carries_the_hashes_of_both_its_forms(tree, tmp_path):
    layer = layer_from_tree(tree, tmp_path / "layer.tar.gz", prefix="opt/x")
    packed = (tmp_path / "layer.tar.gz").read_bytes()
    assert (layer.digest, layer.size_bytes) == (sha256(packed), len(packed))
    assert layer.diff_id == sha256(gzip.decompress(packed))
    with tarfile.open(tmp_path / "layer.tar.gz") as tar:
        members = {member.name: member for member in tar}
    assert members["opt/x/bin/alias"].linkname == "tool"
    assert members["opt/x/bin/tool"].mode & 0o111
    assert {member.uid for member in members.values()} == {0}


def test_a_plain_layer_is_its_own_tar_and_the_manifest_says_so(tree, tmp_path):
    plain = layer_from_tree(tree, tmp_path / "plain.tar", gzip_level=0)
    packed = layer_from_tree(tree, tmp_path / "packed.tar.gz")
    assert plain.digest == plain.diff_id == packed.diff_id
    assert plain.digest == sha256((tmp_path / "plain.tar").read_bytes())
    config = config_bytes([plain, packed], ImageConfig())
    layers = json.loads(manifest_bytes([plain, packed], config))["layers"]
    ends = ["rootfs.diff.tar", "rootfs.diff.tar.gzip"]
    assert [one["mediaType"].endswith(end) for one, end in zip(layers, ends, strict=True)] == [
        True,
        True,
    ]


def test_an_existing_tar_becomes_the_layer_with_its_own_diff_id(tree, tmp_path):
    with tarfile.open(tmp_path / "plain.tar", "w") as tar:
        tar.add(tree, arcname=".")
    layer = layer_from_tar(tmp_path / "plain.tar", tmp_path / "layer.tar.gz")
    assert layer.diff_id == sha256((tmp_path / "plain.tar").read_bytes())


def test_the_manifest_points_at_config_and_layers(tmp_path):
    layer = layer_from_files({"usr/bin/x": (b"x", 0o755), "tmp/": (b"", 0o1777)}, tmp_path / "l")
    config = config_bytes([layer], ImageConfig(entrypoint=["/usr/bin/x"], env={"A": "1"}))
    manifest = json.loads(manifest_bytes([layer], config))
    assert manifest["config"]["digest"] == sha256(config)
    assert [entry["digest"] for entry in manifest["layers"]] == [layer.digest]
    body = json.loads(config)
    assert body["rootfs"]["diff_ids"] == [layer.diff_id]
    assert body["config"]["Entrypoint"] == ["/usr/bin/x"]
    assert body["architecture"] == "amd64"


class FakeRegistry(BaseHTTPRequestHandler):
    """As much of the registry API as an upload needs; checks digests as the real one does."""

    blobs: dict[str, bytes]
    manifests: dict[str, bytes]
    refuse = False

    def do_HEAD(self):
        self._answer(200 if self.path.rpartition("/")[2] in self.blobs else 404)

    def do_POST(self):
        self._answer(500 if self.refuse else 202, {"Location": f"{self.path}1?_state=a"})

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "/manifests/" in self.path:
            self.manifests[self.path] = body
            self._answer(201)
            return
        digest = self.path.partition("digest=")[2]
        self.blobs[digest] = body
        self._answer(201 if sha256(body) == digest else 400)

    def _answer(self, status, headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def registry():
    handler = type("Handler", (FakeRegistry,), {"blobs": {}, "manifests": {}})
    server = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def test_a_push_uploads_everything_and_returns_the_digest_that_pins_it(registry, tmp_path):
    address, handler = registry
    layer = layer_from_files({"x": (b"x", 0o644)}, tmp_path / "l")
    digest = push_image(address, "lab/x", "1", [layer], ImageConfig())
    manifest = handler.manifests["/v2/lab/x/manifests/1"]
    assert digest == sha256(manifest)
    assert layer.digest in handler.blobs
    assert json.loads(manifest)["config"]["digest"] in handler.blobs


def test_a_refused_push_names_the_request(registry, tmp_path):
    address, handler = registry
    handler.refuse = True
    layer = layer_from_files({"x": (b"x", 0o644)}, tmp_path / "l")
    with pytest.raises(LabError, match=r"POST http://.*/blobs/uploads/: HTTP 500"):
        push_image(address, "lab/x", "1", [layer], ImageConfig())
