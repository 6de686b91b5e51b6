"""Other hosts as a source: a real fetch with a peer and a hub on localhost."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from builder_hub import Hub, fetch_order
from builder_trees import run_tool, tool_environment

REPOSITORY = "lab/tiny/resolve/" + "c" * 40
TREE = "f" * 64
SIZE = 3_000_000
KEY = "the-key-of-the-peers"


@pytest.fixture
def source(hub):
    directory = hub.root / REPOSITORY
    (directory / "sub").mkdir(parents=True)
    (directory / "large.bin").write_bytes(os.urandom(SIZE))
    (directory / "empty").write_bytes(b"")
    (directory / "sub/a file.json").write_text("{}")
    return directory


@pytest.fixture
def peer(tmp_path, source):
    """A host that has the tree, at the addresses that its nginx gives it."""
    with Hub(tmp_path / "peer") as found:
        (found.root / TREE).mkdir()
        (found.root / TREE / "files").symlink_to(source)
        yield found


@pytest.fixture
def order(hub, source, tmp_path):
    def write(*peers, **changes):
        (tmp_path / "key").write_text(KEY + "\n")
        told = {
            "urls": [one if isinstance(one, str) else one.url for one in peers],
            "key_file": str(tmp_path / "key"),
            "patience_s": 1,
        }
        urls = [f"{hub.url}/{REPOSITORY}/"]
        document = fetch_order(source, tmp_path / "out", urls, peers=told, **changes)
        path = tmp_path / "fetch.json"
        path.write_text(json.dumps(document))
        return path

    return write


def same(out, source):
    for path in source.rglob("*"):
        if path.is_file():
            assert (out / path.relative_to(source)).read_bytes() == path.read_bytes()
    return run_tool("verify", out, "--full").returncode == 0


def from_hub(hub):
    return sum(size for status, size in hub.sent.items() if status < 300)


def test_what_a_peer_has_is_not_asked_of_the_hub(order, hub, peer, source, tmp_path):
    (tmp_path / "token").write_text("the-token-of-the-hub\n")
    run_tool("fetch", order(peer, token_file=str(tmp_path / "token")))
    assert same(tmp_path / "out", source)
    assert from_hub(hub) == 0
    assert {headers.get("Authorization") for _, headers, _ in peer.requests} == {f"Bearer {KEY}"}
    assert all(KEY not in str(headers) for _, headers, _ in hub.requests)


def test_a_peer_that_dies_in_the_middle_of_a_file_costs_only_its_rest(
    order, hub, peer, source, tmp_path
):
    def die(handler, path, data):
        if not path.endswith("large.bin") or handler.headers.get("Range") == "bytes=0-0":
            return False
        handler.answer(200, data[: SIZE // 3], announced=len(data))
        handler.close_connection = True
        peer.fault = lambda handler, path, data: handler.answer(503, b"") or True
        return True

    peer.fault = die
    said = run_tool("fetch", order(peer)).stderr
    assert same(tmp_path / "out", source)
    assert "skipped for 300 s: " in said
    asked = {h.get("Range") for path, h, _ in hub.requests if path.endswith("large.bin")}
    assert asked == {f"bytes={SIZE // 3}-{SIZE - 1}"}
    assert from_hub(hub) < SIZE * 0.7


def test_a_peer_that_is_not_there_does_not_keep_the_next_one_from_being_asked(
    order, hub, peer, source, tmp_path
):
    run_tool("fetch", order("http://127.0.0.1:9", peer))
    assert same(tmp_path / "out", source)
    assert from_hub(hub) == 0


def test_where_no_peer_is_there_the_hub_gives_all(order, hub, source, tmp_path):
    began = time.monotonic()
    run_tool("fetch", order("http://127.0.0.1:9"))
    assert same(tmp_path / "out", source)
    assert from_hub(hub) >= SIZE
    assert time.monotonic() - began < 20


def test_a_peer_that_fetches_the_file_itself_is_waited_for(order, hub, peer, source, tmp_path):
    files, hidden = peer.root / TREE / "files", peer.root / "hidden"
    files.rename(hidden)
    stop = threading.Event()

    def fetching():
        for pieces in range(1, 8):
            line = f"progress phase=fetch bytes={pieces} total={SIZE}"
            (peer.root / TREE / "progress").write_text(line)
            if stop.wait(0.4):
                return
        hidden.rename(files)

    thread = threading.Thread(target=fetching)
    thread.start()
    try:
        run_tool("fetch", order(peer))
    finally:
        stop.set()
        thread.join()
    assert same(tmp_path / "out", source)
    assert from_hub(hub) == 0


def test_a_peer_that_stands_still_is_not_waited_for(order, hub, peer, source, tmp_path):
    (peer.root / TREE / "files").unlink()
    (peer.root / TREE / "progress").write_text("progress phase=fetch bytes=1")
    run_tool("fetch", order(peer))
    assert same(tmp_path / "out", source)
    assert from_hub(hub) >= SIZE


def test_other_bytes_of_a_peer_are_refused_and_the_hub_s_taken(order, hub, peer, source, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    damaged = bytearray((source / "large.bin").read_bytes())
    damaged[1_000_000] ^= 1
    (other / "large.bin").write_bytes(damaged)
    (peer.root / TREE / "files").unlink()
    (peer.root / TREE / "files").symlink_to(other)
    said = run_tool("fetch", order(peer)).stderr
    assert "sha256 is" in said
    assert same(tmp_path / "out", source)


def test_without_a_key_no_peer_is_asked(order, hub, peer, source, tmp_path):
    path = order(peer)
    (tmp_path / "key").unlink()
    assert "peers not used" in run_tool("fetch", path).stderr
    assert peer.requests == []
    assert same(tmp_path / "out", source)


def test_no_proxy_stands_between_peers(order, hub, peer, source, tmp_path):
    with Hub(tmp_path / "proxied") as proxy:
        command = [sys.executable, "-m", "spark_checkpoint", "fetch", order(peer, tries=1)]
        environment = {**tool_environment(), "http_proxy": proxy.url, "no_proxy": ""}
        subprocess.run(command, env=environment, capture_output=True, check=False)
        asked = {path.rpartition("/")[2] for path, *_ in proxy.requests}
    assert asked <= {"empty"}  # which only the hub has
    assert {path.rpartition("/")[2] for path, *_ in peer.requests} >= {"large.bin", "a file.json"}
