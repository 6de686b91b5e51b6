"""The verified fetcher against a hub on localhost."""

import json
import os

import pytest
from builder_hub import fetch_order
from builder_trees import run_tool

REPOSITORY = "lab/tiny/resolve/" + "c" * 40


@pytest.fixture
def source(hub):
    directory = hub.root / REPOSITORY
    (directory / "sub").mkdir(parents=True)
    for number, size in enumerate((300_000, 2_500_000, 0, 17)):
        (directory / f"file-{number}.bin").write_bytes(os.urandom(size))
    (directory / "sub" / "a file.json").write_text("{}")
    return directory


@pytest.fixture
def order(hub, source, tmp_path):
    def write(**changes):
        path = tmp_path / "fetch.json"
        document = fetch_order(source, tmp_path / "out", [f"{hub.url}/{REPOSITORY}/"], **changes)
        path.write_text(json.dumps(document))
        return path

    return write


def contents(directory):
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in directory.rglob("*")
        if p.is_file() and p.name != "receipt.json"
    }


def test_a_fetched_tree_is_the_repository_and_its_receipt_says_so(order, source, tmp_path):
    run_tool("fetch", order())
    assert contents(tmp_path / "out") == contents(source)
    receipt = json.loads((tmp_path / "out/receipt.json").read_text())
    assert (receipt["kind"], receipt["digest"], receipt["commit"]) == ("source", "f" * 64, "c" * 40)
    assert run_tool("verify", tmp_path / "out", "--full").returncode == 0


def test_a_second_fetch_asks_nobody(order, hub, tmp_path):
    run_tool("fetch", order())
    hub.requests.clear()
    assert "already holds" in run_tool("fetch", order()).stderr
    assert hub.requests == []


def test_wrong_content_is_refused_and_never_published(order, hub, source, tmp_path):
    path = order()
    damaged = bytearray((source / "file-1.bin").read_bytes())
    damaged[1_000_000] ^= 1
    (source / "file-1.bin").write_bytes(damaged)
    done = run_tool("fetch", path, check=False)
    assert done.returncode == 3
    assert "sha256 is" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_hub_that_is_down_gives_one_line_and_the_next_run_finishes(order, hub, source, tmp_path):
    hub.fault = lambda handler, path, data: handler.answer(503, b"") or True
    done = run_tool("fetch", order(), check=False)
    assert done.returncode == 4
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    hub.fault = None
    run_tool("fetch", order())
    assert contents(tmp_path / "out") == contents(source)


def test_bytes_on_the_host_are_linked_and_not_downloaded(order, hub, source, tmp_path):
    cache = tmp_path / "cache/models--lab--tiny/blobs"
    cache.mkdir(parents=True)
    (cache / "anything").write_bytes((source / "file-1.bin").read_bytes())
    run_tool("fetch", order(look_in=[str(tmp_path / "cac*")]))
    assert os.path.samefile(cache / "anything", tmp_path / "out/file-1.bin")
    assert not any("file-1" in path for path, _, _ in hub.requests)
    assert contents(tmp_path / "out") == contents(source)
