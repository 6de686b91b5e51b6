"""An image's blobs as a tree: a registry on localhost that wants a token, and peers."""

import hashlib
import json
import os
import platform
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from builder_hub import Handler, Hub
from builder_trees import run_tool

NAME = "lab/engine"
LAYER = os.urandom(3_000_000)
CONFIG = json.dumps({"config": {}}).encode()
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def digest(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def manifest_of(*layers):
    blobs = [{"digest": digest(one), "size": len(one)} for one in layers]
    config = {"digest": digest(CONFIG), "size": len(CONFIG)}
    return json.dumps({"mediaType": MANIFEST, "config": config, "layers": blobs}).encode()


class Registry(Hub):
    """A registry whose tokens are good for three requests."""

    def __init__(self, root):
        super().__init__(root)
        self._server.RequestHandlerClass = Challenging
        self.tokens = 0
        self.left = {}  # requests that each token is still good for

    def put(self, kind, data):
        place = self.root / "v2" / NAME / kind / digest(data)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        return digest(data)


class Challenging(Handler):
    def do_GET(self):  # noqa: N802 - http.server asks for this name
        hub, address = self.server.hub, urlsplit(self.path)
        if address.path == "/token":
            assert parse_qs(address.query)["scope"] == [f"repository:{NAME}:pull"]
            hub.tokens += 1
            hub.left[f"Bearer t{hub.tokens}"] = 3
            self.answer(200, json.dumps({"token": f"t{hub.tokens}"}).encode())
            return
        shown = self.headers.get("Authorization")
        if not hub.left.get(shown):
            said = f'Bearer realm="{hub.url}/token",service="s",scope="repository:{NAME}:pull"'
            self.answer(401, b"", {"WWW-Authenticate": said})
            return
        hub.left[shown] -= 1
        if "/manifests/" in unquote(address.path):
            assert MANIFEST in self.headers["Accept"]
        super().do_GET()


@pytest.fixture
def registry(tmp_path):
    with Registry(tmp_path / "registry") as found:
        for blob in (CONFIG, LAYER):
            found.put("blobs", blob)
        yield found


@pytest.fixture
def take(registry, tmp_path):
    def run(reference, *, peers=None, check=True):
        host = registry.url.removeprefix("http://")
        document = {
            "schema_version": 1, "digest": "f" * 64, "reference": f"{host}/{NAME}@{reference}",
            "plain": True, "out": str(tmp_path / "out"), "tries": 2, "backoff_s": 0.01,
        }  # fmt: skip
        if peers:
            (tmp_path / "key").write_text("key-of-the-peers\n")
            told = {"urls": peers, "key_file": str(tmp_path / "key"), "patience_s": 1}
            document["peers"] = told
        (tmp_path / "layers.json").write_text(json.dumps(document))
        return run_tool("layers", tmp_path / "layers.json", tmp_path / "manifests", check=check)

    return run


def test_a_list_of_platforms_leads_to_the_blobs_of_this_machine(registry, take, tmp_path):
    manifest = registry.put("manifests", manifest_of(LAYER, LAYER))
    listed = [
        {"digest": digest(b"other"), "platform": {"os": "linux", "architecture": "vax"}},
        {"digest": manifest, "platform": {"os": "linux", "architecture": MACHINE}},
    ]
    index = registry.put("manifests", json.dumps({"manifests": listed}).encode())
    assert take(index).returncode == 0
    assert (tmp_path / "out" / digest(LAYER)).read_bytes() == LAYER
    assert (tmp_path / "out" / digest(CONFIG)).read_bytes() == CONFIG
    assert {path.name for path in (tmp_path / "manifests").iterdir()} == {index, manifest}
    assert registry.tokens > 1  # one that ended was asked for again


def test_what_a_peer_has_is_not_asked_of_the_registry(registry, take, tmp_path):
    manifest = registry.put("manifests", manifest_of(LAYER))
    with Hub(tmp_path / "peer") as peer:
        (peer.root / ("f" * 64)).mkdir()
        (peer.root / ("f" * 64) / "files").symlink_to(registry.root / "v2" / NAME / "blobs")
        assert take(manifest, peers=[peer.url]).returncode == 0
    assert (tmp_path / "out" / digest(LAYER)).read_bytes() == LAYER
    assert not [path for path, *_ in registry.requests if "/blobs/" in path]


def test_a_manifest_of_another_digest_is_refused(registry, take, tmp_path):
    manifest = registry.put("manifests", manifest_of(LAYER))
    place = registry.root / "v2" / NAME / "manifests" / manifest
    place.write_bytes(manifest_of(CONFIG))
    ended = take(manifest, check=False)
    assert ended.returncode == 3
    assert f"is {digest(manifest_of(CONFIG))}" in ended.stderr
    assert not (tmp_path / "out").exists()


def test_a_blob_with_other_bytes_makes_no_tree(registry, take, tmp_path):
    manifest = registry.put("manifests", manifest_of(LAYER))
    place = registry.root / "v2" / NAME / "blobs" / digest(LAYER)
    place.write_bytes(LAYER[::-1])
    assert take(manifest, check=False).returncode == 3
    assert not (tmp_path / "out").exists()


def test_a_token_over_http_for_a_registry_with_tls_is_not_asked_for():
    from spark_checkpoint.sources.client import request_token

    challenge = 'Bearer realm="http://127.0.0.1:1/token",service="s"'
    assert request_token(challenge, None, "https", None) is None
    assert request_token('Basic realm="x"', None, "https", None) is None
