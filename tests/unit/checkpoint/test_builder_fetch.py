"""The verified fetcher against a hub on localhost."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest
from builder_faults import run_broken
from builder_hub import REPOSITORY, Hub, contents
from builder_trees import piece_lines, run_tool, tool_environment


def test_a_fetched_tree_is_the_repository_and_its_receipt_says_so(order, source, tmp_path):
    run_tool("fetch", order())
    assert contents(tmp_path / "out") == contents(source)
    receipt = json.loads((tmp_path / "out/receipt.json").read_text())
    assert (receipt["kind"], receipt["digest"], receipt["commit"]) == ("source", "f" * 64, "c" * 40)
    assert run_tool("verify", tmp_path / "out", "--full").returncode == 0


def test_a_second_fetch_asks_nobody(order, hub, tmp_path):
    run_tool("fetch", order())
    hub.requests.clear()
    assert "already has" in run_tool("fetch", order()).stderr
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


def test_a_file_that_its_owner_keeps_to_himself_is_copied_for_all_to_read(
    order, hub, source, tmp_path
):
    private = tmp_path / "private"
    private.write_bytes((source / "file-1.bin").read_bytes())
    private.chmod(0o600)
    run_tool("fetch", order(look_in=[str(private)]))
    fetched = tmp_path / "out/file-1.bin"
    assert not os.path.samefile(private, fetched)
    assert (private.stat().st_mode & 0o777, fetched.stat().st_mode & 0o777) == (0o600, 0o644)
    assert not any("file-1" in path for path, _, _ in hub.requests)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
@pytest.mark.parametrize(
    ("owner", "mode"), [(65534, 0o644), (65534, 0o444), (0, 0o664), (0, 0o666)]
)
def test_a_file_that_somebody_else_could_write_to_is_copied(
    order, hub, source, tmp_path, owner, mode
):
    theirs = tmp_path / "home/blob"
    theirs.parent.mkdir()
    theirs.write_bytes((source / "file-1.bin").read_bytes())
    os.chown(theirs, owner, owner)
    theirs.chmod(mode)
    run_tool("fetch", order(look_in=[str(theirs.parent)]))
    fetched = tmp_path / "out/file-1.bin"
    assert not os.path.samefile(theirs, fetched)
    assert (fetched.stat().st_uid, fetched.stat().st_mode & 0o022) == (0, 0)
    theirs.write_bytes(b"something else")
    assert contents(tmp_path / "out") == contents(source)
    assert not any("file-1" in path for path, _, _ in hub.requests)


@pytest.mark.parametrize("place", ["file-1.bin", "other-name"])
def test_a_hub_cache_is_used_through_its_blobs(order, hub, source, tmp_path, place):
    cache = tmp_path / "cache/models--lab--tiny"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots/abc").mkdir(parents=True)
    data = (source / "file-1.bin").read_bytes()
    blob = cache / "blobs" / hashlib.sha256(data).hexdigest()
    blob.write_bytes(data)
    (cache / "snapshots/abc" / place).symlink_to(f"../../blobs/{blob.name}")
    run_tool("fetch", order(look_in=[str(cache.parent)]))
    fetched = tmp_path / "out/file-1.bin"
    assert not fetched.is_symlink()
    assert os.path.samefile(fetched, blob)
    assert blob.read_bytes() == data


def test_bytes_of_the_right_size_but_wrong_content_are_not_used(order, hub, source, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "file-1.bin").write_bytes(bytes(2_500_000))
    (cache / "dangling").symlink_to("nowhere")
    run_tool("fetch", order(look_in=[str(cache)]))
    assert contents(tmp_path / "out") == contents(source)
    assert (cache / "file-1.bin").read_bytes() == bytes(2_500_000)


def test_a_tree_wholly_on_the_host_needs_no_network(order, hub, source, tmp_path):
    run_tool("fetch", order(urls=[], look_in=[str(source)]))
    assert contents(tmp_path / "out") == contents(source)
    assert hub.requests == []


def test_the_next_source_is_used_when_one_lacks_a_file_or_lies(order, hub, source, tmp_path):
    lying = tmp_path / "lying"
    with Hub(lying) as peer:
        (lying / REPOSITORY).mkdir(parents=True)
        wrong = bytes(300_000)
        (lying / REPOSITORY / "file-0.bin").write_bytes(wrong)
        done = run_tool(
            "fetch", order(urls=[f"{peer.url}/{REPOSITORY}", f"{hub.url}/{REPOSITORY}"])
        )
    assert "sha256 is" in done.stderr
    assert "answers 404" in done.stderr
    assert contents(tmp_path / "out") == contents(source)


def test_the_token_is_for_the_hub_and_not_for_mirrors_before_it(order, hub, tmp_path):
    (tmp_path / "token").write_text("hf_secret")
    token = {"token_file": str(tmp_path / "token")}
    (tmp_path / "empty").mkdir()
    with Hub(tmp_path / "empty") as mirror:
        run_tool("fetch", order(urls=[mirror.url, f"{hub.url}/{REPOSITORY}"], **token))
    assert mirror.requests
    assert all("Authorization" not in headers for _, headers, _ in mirror.requests)
    assert {h.get("Authorization") for _, h, _ in hub.requests} == {"Bearer hf_secret"}


def test_a_public_repository_is_fetched_without_a_token_that_the_hub_refuses(
    order, hub, source, tmp_path
):
    (tmp_path / "token").write_text("hf_expired")
    hub.fault = lambda handler, path, data: (
        handler.headers.get("Authorization") and (handler.answer(401, b"") or True)
    )
    done = run_tool("fetch", order(token_file=str(tmp_path / "token"), parallel=1))
    assert contents(tmp_path / "out") == contents(source)
    assert len([h for _, h, _ in hub.requests if "Authorization" in h]) == 1
    assert "hf_expired" not in done.stdout + done.stderr


def test_a_job_whose_token_was_removed_asks_without(order, hub, source, tmp_path):
    run_tool("fetch", order(token_file=str(tmp_path / "removed")))
    assert contents(tmp_path / "out") == contents(source)
    assert not any("Authorization" in headers for _, headers, _ in hub.requests)


@pytest.mark.parametrize("bypassed", [False, True])
def test_a_proxy_is_asked_unless_the_environment_names_the_host_as_none_of_its_own(
    order, hub, source, tmp_path, bypassed
):
    (tmp_path / "empty").mkdir()
    with Hub(tmp_path / "empty" if bypassed else hub.root) as proxy:
        urls = [f"{hub.url}/{REPOSITORY}" if bypassed else f"http://hub.invalid/{REPOSITORY}"]
        environment = {**tool_environment(), "http_proxy": proxy.url}
        environment["no_proxy"] = "127.0.0.1" if bypassed else ""
        command = [sys.executable, "-m", "spark_checkpoint", "fetch", str(order(urls=urls))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert bool(proxy.requests) is not bypassed
    assert contents(tmp_path / "out") == contents(source)


def test_a_proxy_with_a_login_is_asked_with_it_and_no_message_shows_it(order, hub, tmp_path):
    with Hub(hub.root) as proxy:
        urls = [f"http://hub.invalid/{REPOSITORY}"]
        address = proxy.url.replace("http://", "http://ann:pass%20word@")
        environment = {**tool_environment(), "http_proxy": address, "no_proxy": ""}
        command = [sys.executable, "-m", "spark_checkpoint", "fetch", str(order(urls=urls))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        asked = {
            value
            for _, headers, _ in proxy.requests
            for name, value in headers.items()
            if name.lower() == "proxy-authorization"
        }
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "out")
    assert asked == {"Basic " + base64.b64encode(b"ann:pass word").decode()}
    gone = subprocess.run(
        [*command[:-1], str(order(urls=urls, tries=1))],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert gone.returncode == 4
    assert "pass" not in done.stderr + done.stdout + gone.stderr + gone.stdout


def test_small_files_known_by_their_git_hash_are_proven_too(order, source, tmp_path):
    def git(data):
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    path = order()
    document = json.loads(path.read_text())
    for entry in document["files"]:
        entry.pop("sha256")
        entry["git_sha1"] = git((source / entry["path"]).read_bytes())
    path.write_text(json.dumps(document))
    run_tool("fetch", path)
    receipt = json.loads((tmp_path / "out/receipt.json").read_text())
    for entry in receipt["files"]:
        data = (source / entry["path"]).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
    run_tool("verify", tmp_path / "out", "--full")
    document["files"][0]["git_sha1"] = "0" * 40
    document["out"] = str(tmp_path / "second")
    path.write_text(json.dumps(document))
    done = run_tool("fetch", path, check=False)
    assert (done.returncode, "git sha1 is" in done.stderr) == (3, True)


BAD_ORDERS = {
    "a path that leaves the tree": (["files", 0, "path"], "../x", "leaves the tree"),
    "an absolute path": (["files", 0, "path"], "/etc/passwd", "leaves the tree"),
    "the receipt's own name": (["files", 0, "path"], "receipt.json", "is taken"),
    "a file twice": (["files", 0, "path"], "file-1.bin", "is taken"),
    "no hash": (["files", 0, "sha256"], None, "sha256 is missing"),
    "a short commit": (["commit"], "abc", "commit: 'abc' is not of the form"),
    "an unknown key": (["speed"], 1, "speed: unknown"),
    "a word for yes or no": (["pieces"], "yes", "pieces: bool expected, not 'yes'"),
    "no source": (["urls"], [], "urls: empty"),
}


@pytest.mark.parametrize("case", BAD_ORDERS)
def test_a_bad_order_is_refused_before_anything_is_made(order, tmp_path, case):
    keys, value, reason = BAD_ORDERS[case]
    path = order()
    document = json.loads(path.read_text())
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(document))
    done = run_tool("fetch", path, check=False)
    assert done.returncode == 2
    assert reason in done.stderr
    assert not (tmp_path / ".out.partial").exists()


def test_a_receipt_names_the_pieces_of_a_large_file_however_its_bytes_came(order, source, tmp_path):
    data = os.urandom((9 << 20) + 5)
    (source / "file-1.bin").write_bytes(data)
    path = order(pieces=True)
    assert run_broken("fetch", path, number=6, names=["write"]).returncode == -9
    run_tool("fetch", path)
    files = json.loads((tmp_path / "out/receipt.json").read_text())["files"]
    pieces = {file["path"]: file["pieces"] for file in files if "pieces" in file}
    assert pieces == {"file-1.bin": piece_lines(data, 4 << 20)}


def test_pieces_are_hashed_only_for_an_order_that_wants_them(order, source, tmp_path):
    (source / "file-1.bin").write_bytes(os.urandom(9 << 20))
    run_tool("fetch", order())
    files = json.loads((tmp_path / "out/receipt.json").read_text())["files"]
    assert [file["path"] for file in files if "pieces" in file] == []
    run_tool("verify", tmp_path / "out", "--full")
