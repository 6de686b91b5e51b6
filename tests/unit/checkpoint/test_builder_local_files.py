import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from builder_hub import contents, fetch_order
from builder_trees import run_tool, tool_environment
from huggingface_hub import file_download, scan_cache_dir, snapshot_download

from lab.hub import server
from lab.hub.server import running
from spark_deploy.hosts import disk, facts

LARGE = "file-1.bin"
LARGE_BYTES = 2_500_000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners, makes devices")


def requested(hub):
    return {path.rpartition("/")[2] for path, _, _ in hub.requests}


@pytest.mark.parametrize("link_name", [None, LARGE, "other-name"])
def test_links_local_files_whose_content_matches(order, hub, source, tmp_path, link_name):
    cache, data = tmp_path / "cache/models--lab--tiny", (source / LARGE).read_bytes()
    blob = cache / "blobs" / hashlib.sha256(data).hexdigest()
    blob.parent.mkdir(parents=True)
    blob.write_bytes(data)
    if link_name:
        (cache / "snapshots/abc").mkdir(parents=True)
        (cache / "snapshots/abc" / link_name).symlink_to(f"../../blobs/{blob.name}")
    run_tool("fetch", order(look_in=[str(tmp_path / "cac*")]))
    assert not (tmp_path / "out" / LARGE).is_symlink()
    assert os.path.samefile(blob, tmp_path / "out" / LARGE)
    assert LARGE not in requested(hub)
    assert contents(tmp_path / "out") == contents(source)


@pytest.mark.slow
def test_finds_local_files_in_a_cache_with_extremely_deep_directories(order, hub, source, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    shutil.copy(source / LARGE, cache / "model")
    parent = os.open(cache, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("deep", dir_fd=parent)
        os.close(os.open("file", os.O_CREAT, dir_fd=parent))
        child = os.open("deep", os.O_RDONLY, dir_fd=parent)
        os.close(parent)
        parent = child
    os.close(parent)
    try:
        run_tool("fetch", order(look_in=[str(cache)]))
    finally:
        subprocess.run(["rm", "-rf", str(cache)], check=True)
    assert LARGE not in requested(hub)
    assert contents(tmp_path / "out") == contents(source)


@needs_root
@pytest.mark.parametrize(
    ("owner", "mode"), [(0, 0o600), (65534, 0o644), (65534, 0o444), (0, 0o664), (0, 0o666)]
)
def test_copies_local_files_that_are_private_or_writable_by_others(
    order, hub, source, tmp_path, owner, mode
):
    local, fetched = tmp_path / "home/blob", tmp_path / "out" / LARGE
    local.parent.mkdir()
    local.write_bytes((source / LARGE).read_bytes())
    os.chown(local, owner, owner)
    local.chmod(mode)
    run_tool("fetch", order(look_in=[str(local.parent)]))
    assert not os.path.samefile(local, fetched)
    assert local.stat().st_mode & 0o777 == mode
    assert (fetched.stat().st_uid, fetched.stat().st_mode & 0o777) == (0, 0o644)
    local.write_bytes(b"something else")
    assert contents(tmp_path / "out") == contents(source)
    assert LARGE not in requested(hub)


def test_ignores_local_files_with_different_content(order, source, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / LARGE).write_bytes(bytes(LARGE_BYTES))
    (cache / "dangling").symlink_to("nowhere")
    run_tool("fetch", order(look_in=[str(cache)]))
    assert contents(tmp_path / "out") == contents(source)
    assert (cache / LARGE).read_bytes() == bytes(LARGE_BYTES)


# The fetcher; a user replaces a file between the search and the read.
REPLACE_AFTER_SEARCH = """
import os, sys
from spark_checkpoint.__main__ import main
from spark_checkpoint.sources import fetch
search = fetch.find_candidates
def search_and_replace(*arguments):
    candidates = search(*arguments)
    os.replace(sys.argv[1], sys.argv[2])
    return candidates
fetch.find_candidates = search_and_replace
sys.exit(main(sys.argv[3:]))
"""


def link_elsewhere(path, data):
    other = path.with_name("elsewhere")
    other.write_bytes(data)
    path.symlink_to(other)


TRAPS = {
    "pipe": lambda path, data: os.mkfifo(path),
    "endless device": lambda path, data: path.symlink_to("/dev/zero"),
    "device": lambda path, data: os.mknod(path, 0o020666, os.makedev(1, 5)),
    "longer file": lambda path, data: path.write_bytes(data + b"and more"),
    "other content": lambda path, data: path.write_bytes(data[::-1]),
    "link": link_elsewhere,
}


@needs_root
@pytest.mark.parametrize(
    "trap",
    [name if name == "link" else pytest.param(name, marks=pytest.mark.slow) for name in TRAPS],
)
def test_never_uses_a_file_replaced_after_the_search(order, source, tmp_path, trap):
    home, fetched = tmp_path / "home", tmp_path / "out" / LARGE
    home.mkdir()
    shutil.copy(source / LARGE, home / "blob")
    TRAPS[trap](home / ".trap", (source / LARGE).read_bytes())
    path = order(look_in=[str(home / "blob")])
    arguments = [str(home / ".trap"), str(home / "blob"), "fetch", str(path)]
    done = subprocess.run(
        [sys.executable, "-c", REPLACE_AFTER_SEARCH, *arguments],
        env=tool_environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == contents(source)
    assert not fetched.is_symlink()
    assert fetched.stat().st_nlink == 1


COMMIT = "c" * 40
SIZE_BYTES = (1 << 20) + 7
SHARDS = {"a": "xyv", "b": "xyw"}


def xet_hash(data):
    return hashlib.sha256(b"xet" + data).hexdigest()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with two repositories of the lab's hub; only the Xet transfer is replaced."""
    root, by_hash = tmp_path / "hub", {}
    for name, letters in SHARDS.items():
        tree = root / f"lab/{name}" / COMMIT
        tree.mkdir(parents=True)
        (tree.parent / "refs").mkdir()
        (tree.parent / "refs/main").write_text(COMMIT)
        (tree / "config.json").write_text(json.dumps({"model_type": name}))
        for number, letter in enumerate(letters):
            data = letter.encode() * SIZE_BYTES
            by_hash[xet_hash(data)] = data
            (tree / f"model-{number}.safetensors").write_bytes(data)
    plain_headers = server.file_headers

    def xet_headers(commit, record):
        if not record.large:
            return plain_headers(commit, record)
        named = {"X-Xet-Hash": xet_hash(record.disk_path.read_bytes()), "X-Xet-Refresh-Route": "/x"}
        return plain_headers(commit, record) | named

    def xet_get(*, incomplete_path, xet_file_data, **_):
        Path(incomplete_path).write_bytes(by_hash[xet_file_data.file_hash])

    monkeypatch.setattr(server, "file_headers", xet_headers)
    monkeypatch.setattr(file_download, "xet_get", xet_get)
    (tmp_path / "run").mkdir()
    place = tmp_path / "home/.cache/huggingface/hub"
    with running(root, tmp_path / "run") as address:
        for name in SHARDS:
            # Sequential: threads that create the shared directory together do not all use it.
            options = {"endpoint": address, "cache_dir": place, "token": False, "max_workers": 1}
            snapshot_download(f"lab/{name}", **options)
    shared = list(place.glob("blobs/??/*[0-9a-f]"))
    assert len([path for path in shared if not path.suffix]) == len(by_hash), "layout has changed"
    return place


def tree_of(cache, name):
    return cache.parents[3] / f"hub/lab/{name}/{COMMIT}"


def fetch(cache, name, look_in):
    out = cache.parents[3] / f"sources/{name}-{COMMIT[:12]}"
    order = fetch_order(tree_of(cache, name), out, urls=[], look_in=[str(look_in)])
    path = cache.parents[3] / f"fetch-{name}.json"
    path.write_text(json.dumps(order))
    return out, run_tool("fetch", path)


@pytest.mark.parametrize("below", ["", "models--lab--{}"])
def test_linked_blobs_survive_deletion_of_cache(cache, below):
    trees = {}
    for name in SHARDS:
        trees[name], _ = fetch(cache, name, cache / below.format(name))
    info = scan_cache_dir(cache)
    commits = [revision.commit_hash for repo in info.repos for revision in repo.revisions]
    info.delete_revisions(*commits).execute()
    for name, out in trees.items():
        assert contents(out) == contents(tree_of(cache, name))
        assert not any(path.is_symlink() for path in out.rglob("*"))
        assert run_tool("verify", out, "--full").returncode == 0


def fetch_and_list_candidates(order, tmp_path):
    listed = tmp_path / "hashed"
    program = (
        "import sys; from spark_checkpoint.__main__ import main\n"
        "from spark_checkpoint.sources import fetch; use = fetch._Download._use_candidate\n"
        f"def list_and_use(order, file, path): print(path.name, file=open({str(listed)!r}, 'a')); "
        "return use(order, file, path)\n"
        "fetch._Download._use_candidate = list_and_use; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "fetch", str(order)]
    subprocess.run(command, env=tool_environment(), check=True, capture_output=True)
    return listed.read_text().split() if listed.exists() else []


def test_hashes_only_the_cached_blob_whose_name_is_the_expected_hash(cache, tmp_path):
    order = tmp_path / "fetch.json"
    out, tree = tmp_path / "sources/a", tree_of(cache, "a")
    order.write_text(json.dumps(fetch_order(tree, out, [], look_in=[str(cache)])))
    assert len(fetch_and_list_candidates(order, tmp_path)) == len(list(tree.iterdir()))


def test_hashes_at_most_three_candidates_and_skips_sparse_files(order, hub, source, tmp_path):
    cache = tmp_path / "cache"
    sparse = cache / "sparse" / hashlib.sha256((source / LARGE).read_bytes()).hexdigest()
    sparse.parent.mkdir(parents=True)
    sparse.touch()
    os.truncate(sparse, LARGE_BYTES)
    for number in range(9):
        (cache / f"decoy-{number}").write_bytes(bytes(LARGE_BYTES))
    hashed = fetch_and_list_candidates(order(look_in=[str(cache)]), tmp_path)
    assert len(hashed) == 3
    assert sparse.name not in hashed
    assert contents(tmp_path / "out") == contents(source)


def test_finds_files_of_equal_size_by_name_if_no_source_is_given(order, source, tmp_path):
    for number in range(6):
        (source / f"model-{number}.safetensors").write_bytes(os.urandom(100_000))
    run_tool("fetch", order(urls=[], look_in=[str(source)]))
    assert contents(tmp_path / "out") == contents(source)


def test_preflight_finds_shared_blobs_by_sha256(cache):
    target = str(cache.parents[3] / "sources/a")
    script = disk.stored_script([target], [str(cache)])
    out = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    stored = disk.parse_stored(facts.split_sections(out.splitlines())["stored"])
    for letter in "xyvw":
        sha256 = hashlib.sha256(letter.encode() * SIZE_BYTES).hexdigest()
        assert stored.folders.get(sha256) == str(cache)
        if os.geteuid() == 0:
            assert stored.linkable_bytes(target, [(sha256, SIZE_BYTES)]) == SIZE_BYTES
