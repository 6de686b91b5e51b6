import dataclasses
import hashlib
import json
import os
import re
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from spark_contract.fetching import parse_reference

from spark_deploy.config.errors import LockError
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.config.settings.service import ModelAndProfile
from spark_deploy.lock import hub as lookup
from spark_deploy.lock import registry
from spark_deploy.lock.resolve import (
    format_size,
    load_or_extend_lock,
    read_lock,
    required_names,
    write_lock,
)
from spark_deploy.lock.types import EMPTY_LOCK, SourceFile
from tests import forked
from tests.unit.lockfile.hub_trees import BASE, write_inventory
from tests.unit.planning.plans import shipped_catalog

CONFIGURATIONS = {
    name: json.dumps({"config": {"Entrypoint": words}}).encode()
    for name, words in {
        "plain": ["vllm", "serve"], "nginx": ["/docker-entrypoint.sh"], "none": None,
        "older": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
    }.items()
}  # fmt: skip

CATALOG = shipped_catalog()


def sha(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def manifest_of(configuration):
    layers = [{"size": 700}, {"size": 300}]
    return json.dumps({"config": {"digest": sha(configuration)}, "layers": layers}).encode()


MANIFEST = manifest_of(CONFIGURATIONS["plain"])
INDEX = json.dumps(
    {
        "manifests": [
            {"digest": sha(b"other"), "platform": {"os": "linux", "architecture": "s390x"}},
            {"digest": sha(MANIFEST), "platform": {"os": "linux", "architecture": "arm64"}},
        ]
    }
).encode()
MANIFESTS = {
    **{name: manifest_of(item) for name, item in CONFIGURATIONS.items()},
    **{sha(item): item for item in CONFIGURATIONS.values()},
    sha(MANIFEST): MANIFEST,
    "many": INDEX,
}


class Server(BaseHTTPRequestHandler):
    """A registry; ``requests`` records the paths."""

    requests: ClassVar[list[str]] = []
    wrong_digest = False

    def do_GET(self):
        self.requests.append(self.path)
        name = self.path.split("?")[0].rsplit("/", 1)[-1]
        self.reply(200 if name in MANIFESTS else 404, MANIFESTS.get(name, b"{}"))

    def reply(self, code, body):
        self.send_response(code)
        if "manifests" in self.path:
            digest = sha(b"other" if self.wrong_digest else body)
            self.send_header("Docker-Content-Digest", digest)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    Server.requests, Server.wrong_digest = [], False
    result = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=result.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"127.0.0.1:{result.server_port}"
    result.shutdown()
    thread.join()


@pytest.fixture
def settings(hub, server, tmp_path):
    overrides = {
        "model": "lab-tiny",
        "hub.endpoint": hub.url,
        "registries.insecure": [server],
        "images": {"engine": f"{server}/lab/engine:many", "gpu_check": f"{server}/lab/check:plain"},
        "expect.arch": "aarch64",
    }
    return load_hosts({"lab": ["a"]}, root=tmp_path, overrides=overrides)["a"].settings


def test_locks_names_on_first_use(settings, tmp_path, hub, server):
    path, output = tmp_path / "spark.lock.yml", []
    lock = load_or_extend_lock(settings, CATALOG, path, output.append)
    source = lock.source(BASE, "main")
    assert source.commit == "1" * 40
    config, shard = source.files[:2]
    folder = hub.root / BASE / "resolve" / source.commit
    size_bytes = (folder / "config.json").stat().st_size
    assert config == SourceFile("config.json", size_bytes, git_sha1="b" * 40)
    digest = hashlib.sha256((folder / shard.path).read_bytes()).hexdigest()
    assert (shard.path[-12:], shard.sha256, shard.git_sha1) == (".safetensors", digest, None)
    assert lock.images[f"{server}/lab/engine:many"].digest == sha(INDEX)
    assert lock.images[f"{server}/lab/engine:many"].pinned == f"{server}/lab/engine@{sha(INDEX)}"
    assert read_lock(path) == lock
    text = f"  {BASE}: main is commit {'1' * 12}, {format_size(source.size_bytes)}"
    assert text in output


@pytest.mark.parametrize("missing", [0, 1])
def test_looks_up_only_missing_names(settings, tmp_path, hub, missing):
    path = tmp_path / "spark.lock.yml"
    lock = load_or_extend_lock(settings, CATALOG, path, lambda text: None)
    write_lock(
        path, EMPTY_LOCK.with_entries(list(lock.sources.values())[missing:], lock.images.values())
    )
    Server.requests.clear()
    hub.requests.clear()
    assert load_or_extend_lock(settings, CATALOG, path, lambda text: None) == lock
    assert (len(hub.requests), Server.requests) == (missing, [])


def test_requiring_a_lock_rejects_names_that_are_not_locked(settings, tmp_path, hub):
    strict = dataclasses.replace(settings, locked="required")
    with pytest.raises(LockError) as caught:
        load_or_extend_lock(strict, CATALOG, tmp_path / "spark.lock.yml", lambda text: None)
    assert len(caught.value.problems) == 4
    assert hub.requests == Server.requests == []
    assert not (tmp_path / "spark.lock.yml").exists()


def test_rejects_repository_at_two_revisions(settings, tmp_path, hub):
    tiny = CATALOG.model("lab-tiny")
    older = dataclasses.replace(tiny, sources=dataclasses.replace(tiny.sources, revision="v1"))
    profiles = {**CATALOG.profiles, ("base", "older"): CATALOG.profile("base", "lab-tiny")}
    models = {**CATALOG.models, "older": older}
    catalog = dataclasses.replace(CATALOG, models=models, profiles=profiles)
    ready = (ModelAndProfile(model="older", profile="base"),)
    both = dataclasses.replace(settings, profile="base", keep_ready=ready)
    with pytest.raises(LockError, match=r"lab/tiny-int4: main and v1 are required"):
        load_or_extend_lock(both, catalog, tmp_path / "spark.lock.yml", lambda text: None)
    assert hub.requests == Server.requests == []


def test_locks_only_required_donors(settings):
    base = dataclasses.replace(settings, profile="base")
    assert {repo for repo, _ in required_names(base, CATALOG).sources} == {"lab/tiny-int4"}


@pytest.mark.parametrize(
    ("code", "what"),
    [("RepoNotFound", "no such repository"), ("RevisionNotFound", "no branch, tag")],
)
def test_reports_unknown_repository_or_revision(hub, code, what):
    hub.fault = lambda handler, *_: handler.answer(404, b"{}", {"X-Error-Code": code}) or True
    with pytest.raises(LockError, match=what):
        lookup.look_up_repo(hub.url, BASE, "main", None)


def test_reports_unreachable_hub():
    with pytest.raises(LockError, match="cannot be reached"):
        lookup.look_up_repo("http://127.0.0.1:9", BASE, "main", None)


ENGINE: dict[str, Any] = {"engine": True}


@pytest.mark.parametrize(
    ("tag", "options", "problem"),
    [
        ("many", {"arch": "aarch64"}, None),
        ("plain", ENGINE, None),
        ("older", ENGINE, None),
        ("nginx", {}, None),
        ("nginx", ENGINE, "the image starts '/docker-entrypoint.sh', but"),
        ("none", {}, None),
        ("none", ENGINE, "the image has no entrypoint"),
        ("many", {}, "no linux/amd64 image"),
        ("v9", {}, "no such image or tag"),
        ("plain", {"insecure": []}, r"registries\.insecure"),
    ],
)
def test_locks_digest_and_compressed_size_of_usable_images(server, tag, options, problem):
    options = {"arch": "x86_64", "insecure": [server], **options}
    with pytest.raises(LockError, match=problem) if problem else nullcontext():
        result = registry.look_up_image(f"{server}/lab/engine:{tag}", **options)
        assert (result.digest, result.size_bytes) == (sha(MANIFESTS[tag]), 1000)


@pytest.mark.parametrize("is_manifest", [True, False])
def test_rejects_manifest_or_configuration_with_wrong_digest(server, monkeypatch, is_manifest):
    Server.wrong_digest, digest = is_manifest, sha(CONFIGURATIONS["plain"])
    monkeypatch.setitem(MANIFESTS, digest, CONFIGURATIONS["nginx"])
    with pytest.raises(LockError, match="does not match digest") as caught:
        registry.look_up_image(
            f"{server}/lab/engine:plain", arch="x", insecure=[server], engine=True
        )
    assert (digest in str(caught.value)) is not is_manifest


def test_suggests_supported_engine_versions(settings, server, tmp_path):
    images = {**settings.images, "engine": f"{server}/lab/engine:v0.33.0"}
    missing = dataclasses.replace(settings, images=images)
    with pytest.raises(LockError) as refusal:
        load_or_extend_lock(missing, CATALOG, tmp_path / "spark.lock.yml", print)
    [problem] = refusal.value.problems
    offered = re.findall(r"\S+/lab/engine:v[\d.]+", problem.fix)
    assert offered == [f"{server}/lab/engine:v{version}" for version in ("0.32.0", "0.30.0")]


@pytest.mark.parametrize(
    ("text", "host", "name", "version"),
    [
        ("vllm/vllm-openai:v1", "registry-1.docker.io", "vllm/vllm-openai", "v1"),
        ("ubuntu", "registry-1.docker.io", "library/ubuntu", "latest"),
        ("docker.io/vllm/vllm-openai:v1", "registry-1.docker.io", "vllm/vllm-openai", "v1"),
        ("index.docker.io/ubuntu", "registry-1.docker.io", "library/ubuntu", "latest"),
        ("10.0.0.1:5000/a/b:c", "10.0.0.1:5000", "a/b", "c"),
        ("localhost/a", "localhost", "a", "latest"),
        ("ghcr.io/a/b@sha256:0", "ghcr.io", "a/b", "sha256:0"),
    ],
)
def test_parses_image_references_as_docker_does(text, host, name, version):
    result = parse_reference(text)
    assert (result.host, result.name, result.version) == (host, name, version)


SOURCE = {"revision": "main", "commit": "1" * 40, "files": []}
OUTSIDE = {"path": "../x", "size_bytes": 1, "git_sha1": "1" * 40}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"images": None}, "images"),
        ({"sources": {"a/b": {**SOURCE, "commit": "main"}}}, "commit"),
        ({"sources": {"a/b": {**SOURCE, "files": [OUTSIDE]}}}, "path"),
    ],
)
def test_rejects_invalid_lock(tmp_path, change, what):
    path = tmp_path / "spark.lock.yml"
    path.write_text(json.dumps({"schema_version": 1, "sources": {}, "images": {}, **change}))
    with pytest.raises(LockError, match=what):
        read_lock(path)


@pytest.mark.slow
def test_deploy_locks_names_once_and_prints_them(server, hub, tmp_path):
    variables = (
        f"model: lab-tiny\nhub: {{endpoint: '{hub.url}'}}\n"
        f"registries: {{insecure: ['{server}']}}\n"
        f"images: {{engine: '{server}/lab/engine:many', gpu_check: '{server}/lab/check:plain'}}\n"
    )
    folder = tmp_path / "here"
    write_inventory(folder, variables, "@local")
    (folder / "deploy.py").write_text(
        "from pyinfra.context import host\n"
        "from spark_deploy.inventory.plans import plan_for\n"
        "assert plan_for(host).sources[0].locked.commit == '1' * 40\n"
    )
    words = ("pyinfra", "inventory.py", "deploy.py", "-y")
    for first in (True, False):
        Server.requests.clear()
        hub.requests.clear()
        done = forked.run(words, cwd=folder, env=os.environ)
        assert done.returncode == 0, done.stderr
        assert ("lab/tiny-int4: main is commit 111111111111, 3.0 MB" in done.stderr) == first
        assert ("names in lab/tiny-int4 and " in done.stderr) == first
        assert len(set(Server.requests)) == (4 if first else 0)
        listings = {path for path, _, _ in hub.requests if path.startswith("/api/")}
        assert len(listings) == (3 if first else 0)
        assert bool(hub.requests) == first
    lock = read_lock(folder / "spark.lock.yml")
    assert (len(lock.images), len(lock.names)) == (2, 1)


def test_syncs_lock_before_renaming_it(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, n=name, r=real: (calls.append(n), r(*a))[1])
    write_lock(tmp_path / "spark.lock.yml", EMPTY_LOCK)
    assert calls == ["fsync", "rename", "fsync"]
    assert [path.name for path in tmp_path.iterdir()] == ["spark.lock.yml"]


def test_reports_unwritable_lock(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(LockError, match=r"cannot be written(.|\n)*make its directory writable"):
        write_lock(tmp_path / "taken" / "spark.lock.yml", EMPTY_LOCK)
