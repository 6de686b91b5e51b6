import hashlib
import json
import os
import platform
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from builder_hub import Handler, Hub
from builder_trees import run_tool
from spark_checkpoint.sources.connections import request_token

NAME = "lab/engine"
LAYER = os.urandom(3_000_000)
CONFIG = json.dumps({"config": {}}).encode()
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def digest(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def manifest_of(*layers):
    blobs = [{"digest": digest(layer), "size": len(layer)} for layer in layers]
    config = {"digest": digest(CONFIG), "size": len(CONFIG)}
    return json.dumps({"mediaType": MANIFEST, "config": config, "layers": blobs}).encode()


class Registry(Hub):
    """A registry; tokens are valid for three requests."""

    def __init__(self, root):
        super().__init__(root)
        self._server.RequestHandlerClass = TokenHandler
        self.tokens = 0
        self.scope_in_realm = False
        self.left = {}

    def path(self, kind, data):
        return self.root / "v2" / NAME / kind / digest(data)

    def put(self, kind, data):
        self.path(kind, data).parent.mkdir(parents=True, exist_ok=True)
        self.path(kind, data).write_bytes(data)
        return digest(data)


class TokenHandler(Handler):
    def do_GET(self):  # noqa: N802 - required by http.server
        hub, address = self.server.hub, urlsplit(self.path)
        if address.path == "/token":
            assert parse_qs(address.query)["scope"] == [f"repository:{NAME}:pull"]
            hub.tokens += 1
            hub.left[f"Bearer t{hub.tokens}"] = 3
            self.answer(200, json.dumps({"token": f"t{hub.tokens}"}).encode())
            return
        login = self.headers.get("Authorization")
        if not hub.left.get(login):
            scope = f"repository:{NAME}:pull"
            realm = f'"{hub.url}/token",service="s",scope="{scope}"'
            if hub.scope_in_realm:
                realm = f'"{hub.url}/token?scope={scope}",service="s"'
            self.answer(401, b"", {"WWW-Authenticate": f"Bearer realm={realm}"})
            return
        hub.left[login] -= 1
        if "/manifests/" in unquote(address.path):
            assert MANIFEST in self.headers["Accept"]
        super().do_GET()


@pytest.fixture
def registry(tmp_path):
    with Registry(tmp_path / "registry") as running:
        for blob in (CONFIG, LAYER):
            running.put("blobs", blob)
        yield running


@pytest.fixture
def fetch(registry, tmp_path):
    def run(reference, *, peers=None, check=True):
        host = registry.url.removeprefix("http://")
        document = {
            "schema_version": 1, "digest": "f" * 64, "reference": f"{host}/{NAME}@{reference}",
            "plain": True, "out": str(tmp_path / "out"), "tries": 2, "backoff_s": 0.01,
        }  # fmt: skip
        if peers:
            (tmp_path / "key").write_text("key-of-the-peers\n")
            key_file = str(tmp_path / "key")
            document["peers"] = {"urls": peers, "key_file": key_file, "patience_s": 1}
        (tmp_path / "layers.json").write_text(json.dumps(document))
        return run_tool("layers", tmp_path / "layers.json", tmp_path / "manifests", check=check)

    return run


@pytest.mark.parametrize("scope_in_realm", [False, True])  # True: as nvcr.io
def test_fetches_blobs_for_this_platform_and_renews_tokens(
    registry, fetch, tmp_path, scope_in_realm
):
    registry.scope_in_realm = scope_in_realm
    manifest = registry.put("manifests", manifest_of(LAYER, LAYER))
    listed = [
        {"digest": digest(b"other"), "platform": {"os": "linux", "architecture": "vax"}},
        {"digest": manifest, "platform": {"os": "linux", "architecture": MACHINE}},
    ]
    index = registry.put("manifests", json.dumps({"manifests": listed}).encode())
    fetch(index)
    for blob in (LAYER, CONFIG):
        assert (tmp_path / "out" / digest(blob)).read_bytes() == blob
    assert {path.name for path in (tmp_path / "manifests").iterdir()} == {index, manifest}
    assert registry.tokens > 1


def test_fetches_blobs_from_a_peer(registry, fetch, tmp_path):
    manifest = registry.put("manifests", manifest_of(LAYER))
    with Hub(tmp_path / "peer") as peer:
        (peer.root / ("f" * 64)).mkdir()
        (peer.root / ("f" * 64) / "files").symlink_to(registry.root / "v2" / NAME / "blobs")
        fetch(manifest, peers=[peer.url])
    assert (tmp_path / "out" / digest(LAYER)).read_bytes() == LAYER
    assert not [path for path, *_ in registry.requests if "/blobs/" in path]


@pytest.mark.parametrize("kind", ["manifests", "blobs"])
def test_rejects_layer_content_with_a_different_digest(registry, fetch, tmp_path, kind):
    manifest = registry.put("manifests", manifest_of(LAYER))
    data = manifest_of(LAYER) if kind == "manifests" else LAYER
    other = manifest_of(CONFIG) if kind == "manifests" else LAYER[::-1]
    registry.path(kind, data).write_bytes(other)
    done = fetch(manifest, check=False)
    assert done.returncode == 3
    assert hashlib.sha256(other).hexdigest() in done.stderr
    assert not (tmp_path / "out").exists()


def test_does_not_request_a_token_over_http_for_a_tls_registry():
    challenge = 'Bearer realm="http://127.0.0.1:1/token",service="s"'
    assert request_token(challenge, None, "https", None) is None
    assert request_token('Basic realm="x"', None, "https", None) is None
