import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from builder_faults import flip
from builder_hub import Hub, contents, send_and_crawl
from builder_judge import LAYOUTS
from builder_shards import Raw, read_shard, write_shard
from builder_trees import file_entries, piece_lines, run_tool, tool_environment

TREE = "f" * 64
LARGE, SIZE = "file-1.bin", 2_500_000
KEY = "the-key-of-the-peers"
ABSENT = "http://127.0.0.1:9"


def authorizations(hub):
    return {headers.get("Authorization") for _, headers, _ in hub.requests}


def requested(hub):
    return {path.rpartition("/")[2] for path, *_ in hub.requests}


@pytest.fixture
def peer(tmp_path, source):
    with Hub(tmp_path / "peer") as running:
        (running.root / TREE).mkdir()
        (running.root / TREE / "files").symlink_to(source)
        yield running


@pytest.fixture
def peer_order(order, tmp_path):
    def write(*peers, **changes):
        (tmp_path / "key").write_text(KEY + "\n")
        urls = [getattr(peer, "url", peer) for peer in peers]
        key_file = str(tmp_path / "key")
        return order(peers={"urls": urls, "key_file": key_file, "patience_s": 1}, **changes)

    return write


@pytest.fixture
def fetch(tmp_path, source):
    def run(path):
        done = run_tool("fetch", path)
        assert contents(tmp_path / "out") == contents(source)
        return done

    return run


def sent_bytes(hub):
    return sum(size for status, size in hub.sent.items() if status < 300)


def test_downloads_from_peer_using_key_without_contacting_hub(
    peer_order, hub, peer, fetch, tmp_path
):
    (tmp_path / "token").write_text("the-token-of-the-hub\n")
    fetch(peer_order(ABSENT, peer, token_file=str(tmp_path / "token")))
    assert sent_bytes(hub) == 0
    assert authorizations(peer) == {f"Bearer {KEY}"}
    assert all(KEY not in str(headers) for _, headers, _ in hub.requests)


@pytest.mark.slow
def test_resumes_from_the_hub_if_a_peer_fails_midway_through_a_file(peer_order, hub, peer, fetch):
    def fail(handler, path, data):
        if not path.endswith(LARGE) or handler.headers.get("Range") == "bytes=0-0":
            return False
        handler.answer(200, data[: SIZE // 4], announced=len(data))
        handler.close_connection = True
        peer.fault = lambda handler, path, data: handler.answer(503, b"") or True
        return True

    peer.fault = fail
    assert " for 300 s: " in fetch(peer_order(peer)).stderr
    ranges = {h.get("Range") for path, h, _ in hub.requests if path.endswith(LARGE)}
    assert ranges == {f"bytes={SIZE // 4}-{SIZE - 1}"}


@pytest.mark.slow
def test_downloads_from_the_hub_if_no_peer_responds(peer_order, hub, fetch):
    started = time.monotonic()
    fetch(peer_order(ABSENT))
    assert sent_bytes(hub) >= SIZE
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_waits_for_a_peer_that_is_still_downloading(peer_order, hub, peer, fetch):
    files, hidden = peer.root / TREE / "files", peer.root / "hidden"
    files.rename(hidden)
    stop = threading.Event()

    def progress():
        for pieces in range(1, 8):
            line = f"progress phase=fetch bytes={pieces * 1_000_000} total={SIZE}"
            (peer.root / TREE / "progress").write_text(line)
            if stop.wait(0.4):
                return
        hidden.rename(files)

    thread = threading.Thread(target=progress)
    thread.start()
    try:
        fetch(peer_order(peer))
    finally:
        stop.set()
        thread.join()
    assert sent_bytes(hub) == 0


def test_skips_a_peer_that_makes_no_progress(peer_order, hub, peer, fetch):
    (peer.root / TREE / "files").unlink()
    (peer.root / TREE / "progress").write_text("progress phase=fetch bytes=1")
    fetch(peer_order(peer))
    assert sent_bytes(hub) >= SIZE


@pytest.mark.slow
@pytest.mark.parametrize("rate", [10, 100_000_000], ids=["slow", "claims to be fast"])
def test_does_not_wait_long_for_a_file_that_a_peer_lacks(peer_order, hub, peer, fetch, rate):
    (peer.root / TREE / "files").unlink()
    (peer.root / TREE / "progress").write_text("")
    started = time.monotonic()

    def claim(handler, path, data):
        count = round(rate * (time.monotonic() - started))
        handler.answer(200, f"progress phase=fetch bytes={count} total={SIZE}".encode())
        return True

    peer.fault = claim
    path = peer_order(peer, slow_bytes_per_s=8_000_000)
    path.write_text(path.read_text().replace('"patience_s": 1', '"patience_s": 0.1'))
    fetch(path)
    assert sent_bytes(hub) >= SIZE
    assert time.monotonic() - started < 40


@pytest.mark.slow
def test_abandons_slow_peer_and_resumes_from_hub(peer_order, hub, peer, fetch):
    sent = []

    def crawl(handler, path, data):
        if not path.endswith(LARGE) or handler.headers.get("Range") == "bytes=0-0":
            return False
        sent.append(path)
        send_and_crawl(handler, data)
        return True

    peer.fault = crawl
    started = time.monotonic()
    fetch(peer_order(peer, slow_bytes_per_s=500_000, slow_after_s=0.5))
    assert time.monotonic() - started < 40
    [first] = [h["Range"] for path, h, _ in hub.requests if path.endswith(LARGE)]
    assert int(first.removeprefix("bytes=").partition("-")[0]) >= SIZE // 3
    assert len(sent) == 1


def test_rejects_wrong_bytes_from_peer(peer_order, peer, source, fetch, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(source, other)
    flip(other / LARGE, keep_time=False, offset=1_000_000)
    (peer.root / TREE / "files").unlink()
    (peer.root / TREE / "files").symlink_to(other)
    assert "sha256 is" in fetch(peer_order(peer)).stderr


def test_does_not_query_peers_if_no_key_is_set(peer_order, peer, fetch, tmp_path):
    path = peer_order(peer)
    (tmp_path / "key").unlink()
    fetch(path)
    assert peer.requests == []


def test_does_not_use_a_proxy_for_peers(peer_order, hub, peer, tmp_path):
    with Hub(tmp_path / "proxied") as proxy:
        command = [sys.executable, "-m", "spark_checkpoint", "fetch", peer_order(peer, tries=1)]
        environment = {**tool_environment(), "http_proxy": proxy.url, "no_proxy": ""}
        subprocess.run(command, env=environment, capture_output=True, check=False)
    assert requested(proxy) <= {"file-2.bin"}
    assert requested(peer) >= {LARGE, "a file.json"}


DIGEST = "1" * 64
DRAFTER = "mtp.layers.0.self_attn"
TABLE = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight"


class Copy:
    def __init__(self, workshop, peer, layout, **choices):
        self.workshop, self.peer, self.layout = workshop, peer, layout
        self.choices = {"layout": layout, **choices}
        workshop.build(**self.choices)
        self.original = workshop.root / "original"
        workshop.out.rename(self.original)
        (peer.root / DIGEST).mkdir()
        (peer.root / DIGEST / "files").symlink_to(self.original)
        (workshop.root / "key").write_text(KEY + "\n")
        receipt = (self.original / "receipt.json").read_bytes()
        self.receipt_sha256 = hashlib.sha256(receipt).hexdigest()

    def replace_tree(self):
        tree, files = self.peer.root / "tree", self.peer.root / DIGEST / "files"
        shutil.copytree(self.original, tree)
        files.unlink()
        files.symlink_to(tree)
        return tree

    def write_receipt(self, tree):
        receipt = json.loads((tree / "receipt.json").read_text())
        before = {entry["path"]: entry for entry in receipt["files"]}
        receipt["files"] = file_entries(tree)
        for entry in receipt["files"]:
            old = before.get(entry["path"], entry)
            if "pieces" not in old:
                continue
            data, begin = (tree / entry["path"]).read_bytes(), 0
            sizes = [int(line.partition(":")[0]) for line in old["pieces"]]
            sizes = sizes if sum(sizes) == len(data) else [len(data)]
            del entry["sha256"]
            entry["pieces"] = []
            for size in sizes:
                entry["pieces"] += piece_lines(data[begin : begin + size], size)
                begin += size
        self.send_receipt(tree, receipt)

    def new_tensor(self):
        path = self.original / "model.safetensors.index.json"
        index = json.loads(path.read_text())["weight_map"]
        name = next(name for name in index if ".down_proj.weight" in name and "scale" not in name)
        return index[name], name

    def flip_new_tensor(self, tree):
        shard, name = self.new_tensor()
        data = read_shard(tree / shard)[name].data
        file = (tree / shard).read_bytes()
        (tree / shard).unlink()
        (tree / shard).write_bytes(file.replace(data, bytes([data[0] ^ 1]) + data[1:]))

    def send_receipt(self, tree, receipt):
        (tree / "receipt.json").unlink()
        (tree / "receipt.json").write_text(json.dumps(receipt))
        data = (tree / "receipt.json").read_bytes()
        self.receipt_sha256 = hashlib.sha256(data).hexdigest()

    def build(self, url=None):
        order = {
            "schema_version": 1,
            "digest": DIGEST,
            "trees": [{"url": url or self.peer.url, "receipt_sha256": self.receipt_sha256}],
            "key_file": str(self.workshop.root / "key"),
        }
        path = self.workshop.root / "copy.json"
        path.write_text(json.dumps(order))
        plan = self.workshop.write_plan(**self.choices)
        done = run_tool("build", plan, "--or-copy", path)
        assert contents(self.workshop.out) == contents(self.original)
        assert run_tool("verify", self.workshop.out, "--full").returncode == 0
        return "copied from" in done.stderr


@pytest.fixture(params=LAYOUTS)
def copy(workshop, tmp_path, request):
    with Hub(tmp_path / "peer") as peer:
        yield Copy(workshop, peer, request.param)


@pytest.mark.slow
def test_copies_new_tensors_from_peer_and_links_local_base(copy):
    shutil.rmtree(copy.workshop.donor_dir)
    assert copy.build()
    assert authorizations(copy.peer) == {f"Bearer {KEY}"}
    out = copy.workshop.out
    linked = {path.name for path in out.iterdir() if path.stat().st_nlink > 1}
    assert not linked & requested(copy.peer)
    if copy.layout == "overlay":
        assert {path.name for path in copy.workshop.base_dir.glob("*.safetensors")} <= linked
    receipt = copy.workshop.read("receipt.json")
    assert receipt["plan"]["out"] == str(out)
    for file in receipt["files"]:
        stat = os.stat(out / file["path"])
        assert (file["inode"], file["modified_ns"]) == (stat.st_ino, stat.st_mtime_ns)


@pytest.mark.parametrize("with_mtp", [True, False], ids=["base with MTP", "grafted MTP"])
@pytest.mark.parametrize(
    ("layout", "choices"),
    [
        ("overlay", {"head": "int8-g128", "drafter_int4": [f"{DRAFTER}.q_proj"]}),
        ("full", {"shared_experts": "int8-g128", "drafter_int4": [f"{DRAFTER}.q_proj"]}),
        ("full", {"shared_experts": "keep", "head": "int8-g128"}),
        ("overlay", {"shared_experts": "fp8-self"}),
        ("overlay", {"shared_experts": "fp8-self", "ngram_table": "e2m1"}),
        ("full", {"shared_experts": "keep", "ngram_table": "e2m1"}),
    ],
    ids=["drafter and head", "int8", "head only", "fp8-self", "fp8-self and table", "table only"],
)
def test_copies_every_kind_of_new_tensor_from_a_peer(workshop, tmp_path, layout, choices, with_mtp):
    if not with_mtp:
        workshop.mtp = {}
    if "ngram_table" in choices:
        workshop.base[TABLE] = Raw("BF16", (50, 32), b"\x80\x3f" * 50 * 32)
    with Hub(tmp_path / "peer") as peer:
        copy = Copy(workshop, peer, layout, **choices)
        shutil.rmtree(workshop.donor_dir)
        assert copy.build()


def test_builds_locally_if_bytes_from_a_peer_differ_from_its_receipt(copy):
    copy.flip_new_tensor(copy.replace_tree())
    assert not copy.build()


@pytest.mark.gate
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "modeling_evil.py"])
def test_copies_only_new_tensors_from_hostile_peer(copy, name):
    tree = copy.replace_tree()
    content = {"auto_map": {"AutoModel": "modeling_evil.Model"}}
    if name == "config.json":
        content = {**json.loads((tree / name).read_text()), **content}
    (tree / name).unlink(missing_ok=True)
    (tree / name).write_text(json.dumps(content))
    copy.write_receipt(tree)
    assert not copy.build()
    assert name not in requested(copy.peer)


@pytest.mark.gate
@pytest.mark.parametrize("change", ["shape", "dtype", "zeros", "missing"])
def test_builds_locally_if_tensors_from_hostile_peer_violate_plan(copy, change):
    tree = copy.replace_tree()
    shard, name = copy.new_tensor()
    tensors = read_shard(tree / shard)
    rows, columns = tensors[name].shape
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = {
            "shape": tensors[name]._replace(shape=(columns, rows)),
            "dtype": tensors[name]._replace(dtype="BF16", shape=(rows // 2, columns)),
            "zeros": tensors[name]._replace(data=bytes(rows * columns)),
        }[change]
    (tree / shard).unlink()
    write_shard(tree / shard, tensors)
    copy.write_receipt(tree)
    assert not copy.build()


@pytest.mark.gate
@pytest.mark.parametrize("flips", [False, True])
def test_builds_locally_if_fp8_tensors_from_a_peer_fail_the_hash_check(copy, flips):
    tree = copy.replace_tree()
    if flips:
        copy.flip_new_tensor(tree)
    copy.write_receipt(tree)
    assert copy.build() != flips


@pytest.mark.gate
@pytest.mark.parametrize(
    "paths",
    [["config.json"], ["dd", "dd/x"], ["x" * 300], ["x/" * 2500 + "x"], ["\ud800x"]],
    ids=["twice", "file and directory", "long name", "long path", "not UTF-8"],
)
def test_builds_locally_if_receipt_has_invalid_paths(copy, paths):
    tree = copy.replace_tree()
    receipt = json.loads((tree / "receipt.json").read_text())
    entry = {"size_bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    receipt["files"] += [{"path": path, **entry} for path in paths]
    copy.send_receipt(tree, receipt)
    assert not copy.build()


def test_reads_no_files_from_peer_with_wrong_receipt(copy):
    copy.receipt_sha256 = "0" * 64
    assert not copy.build()
    assert requested(copy.peer) == {"receipt.json"}


def test_never_copies_checkpoint_built_from_different_donor_tensors(copy):
    url = f"{ABSENT}/lab/tiny-fp8/resolve/{'d' * 40}"
    donor = {"url": url, "sha256": "0" * 64, "tries": 1, "backoff_s": 0}
    plan = copy.workshop.plan
    copy.workshop.plan = lambda **changes: plan(donor=donor, **changes)
    with pytest.raises(AssertionError, match="has FP8 source tensors"):
        copy.build()
    assert requested(copy.peer) == {"receipt.json"}


@pytest.mark.slow
def test_builds_locally_if_peer_does_not_respond(copy):
    assert not copy.build(ABSENT)
