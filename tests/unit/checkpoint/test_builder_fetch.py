import base64
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from builder_faults import run_broken
from builder_hub import REPOSITORY, Hub, contents, send_half
from builder_trees import changed, piece_lines, run_tool, tool_environment

LARGE = "file-1.bin"


def start_fetch(order, **options):
    command = [sys.executable, "-m", "spark_checkpoint", "fetch", str(order)]
    return subprocess.Popen(command, env=tool_environment(), text=True, **options)


def receipt_files(tmp_path):
    return json.loads((tmp_path / "out/receipt.json").read_text())["files"]


def test_second_fetch_downloads_nothing(order, hub, source, tmp_path):
    run_tool("fetch", order())
    assert contents(tmp_path / "out") == contents(source)
    receipt = json.loads((tmp_path / "out/receipt.json").read_text())
    assert (receipt["kind"], receipt["digest"], receipt["commit"]) == ("source", "f" * 64, "c" * 40)
    assert run_tool("verify", tmp_path / "out", "--full").returncode == 0
    hub.requests.clear()
    run_tool("fetch", order())
    assert hub.requests == []


def test_never_publishes_wrong_content(order, source, tmp_path):
    path = order()
    damaged = bytearray((source / LARGE).read_bytes())
    damaged[1_000_000] ^= 1
    (source / LARGE).write_bytes(damaged)
    assert run_tool("fetch", path, check=False).returncode == 3
    assert not (tmp_path / "out").exists()


def test_uses_next_source_if_file_is_missing_or_wrong(order, hub, source, tmp_path):
    mirror_root = tmp_path / "mirror"
    with Hub(mirror_root) as mirror:
        (mirror_root / REPOSITORY).mkdir(parents=True)
        (mirror_root / REPOSITORY / "file-0.bin").write_bytes(bytes(300_000))
        urls = [f"{mirror.url}/{REPOSITORY}", f"{hub.url}/{REPOSITORY}"]
        done = run_tool("fetch", order(urls=urls))
    assert "sha256 is" in done.stderr
    assert "returned 404" in done.stderr
    assert contents(tmp_path / "out") == contents(source)


def test_verifies_files_by_git_hash(order, source, tmp_path):
    path = order()
    document = json.loads(path.read_text())
    for entry in document["files"]:
        entry.pop("sha256")
        data = (source / entry["path"]).read_bytes()
        entry["git_sha1"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    path.write_text(json.dumps(document))
    run_tool("fetch", path)
    for entry in receipt_files(tmp_path):
        data = (source / entry["path"]).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
    document["files"][0]["git_sha1"] = "0" * 40
    document["out"] = str(tmp_path / "second")
    path.write_text(json.dumps(document))
    assert run_tool("fetch", path, check=False).returncode == 3


BAD_ORDERS = {
    "a path outside": (["files", 0, "path"], "../x", "points outside the directory"),
    "an absolute path": (["files", 0, "path"], "/etc/passwd", "points outside the directory"),
    "the receipt's name": (["files", 0, "path"], "receipt.json", "is reserved"),
    "a repeated file": (["files", 0, "path"], LARGE, "occurs twice"),
    "no hash": (["files", 0, "sha256"], None, "sha256 and git_sha1 are missing"),
    "a short commit": (["commit"], "abc", "commit: 'abc' does not match"),
    "an unknown key": (["speed"], 1, "speed: unknown"),
    "text for a boolean": (["pieces"], "yes", "pieces: expected bool, got 'yes'"),
    "no source": (["urls"], [], "urls: empty"),
}


@pytest.mark.parametrize("case", BAD_ORDERS)
def test_rejects_invalid_plan_before_any_change(order, tmp_path, case):
    keys, value, problem = BAD_ORDERS[case]
    path = order()
    path.write_text(json.dumps(changed(json.loads(path.read_text()), keys, value)))
    done = run_tool("fetch", path, check=False)
    assert done.returncode == 2
    assert problem in done.stderr
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize("pieces", [True, False])
def test_resumes_a_partly_downloaded_file_after_being_killed(order, hub, source, tmp_path, pieces):
    data = os.urandom((9 << 20) + 5)
    (source / LARGE).write_bytes(data)
    path = order(pieces=pieces)
    assert run_broken("fetch", path, number=6, names=["write"]).returncode == -9
    hub.requests.clear()
    run_tool("fetch", path)
    [byte_range] = large_ranges(hub)
    assert int(re.fullmatch(rf"bytes=(\d+)-{len(data) - 1}", byte_range)[1]) >= 1 << 20
    assert contents(tmp_path / "out") == contents(source)
    assert not (tmp_path / ".out.partial").exists()
    listed = {file["path"]: file["pieces"] for file in receipt_files(tmp_path) if "pieces" in file}
    assert listed == ({LARGE: piece_lines(data, 4 << 20)} if pieces else {})


def test_sends_token_to_hub_but_not_to_mirrors(order, hub, tmp_path):
    (tmp_path / "token").write_text("hf_secret")
    (tmp_path / "empty").mkdir()
    with Hub(tmp_path / "empty") as mirror:
        urls = [mirror.url, f"{hub.url}/{REPOSITORY}"]
        run_tool("fetch", order(urls=urls, token_file=str(tmp_path / "token")))
    assert mirror.requests
    assert all("Authorization" not in headers for _, headers, _ in mirror.requests)
    assert {h.get("Authorization") for _, h, _ in hub.requests} == {"Bearer hf_secret"}


def test_drops_a_rejected_token_and_continues(order, hub, source, tmp_path):
    (tmp_path / "token").write_text("hf_expired")
    hub.fault = lambda handler, path, data: (
        handler.headers.get("Authorization") and (handler.answer(401, b"") or True)
    )
    done = run_tool("fetch", order(token_file=str(tmp_path / "token"), parallel=1))
    assert contents(tmp_path / "out") == contents(source)
    assert len([h for _, h, _ in hub.requests if "Authorization" in h]) == 1
    assert "hf_expired" not in done.stdout + done.stderr


@pytest.mark.slow
def test_fetches_without_token_if_token_file_was_removed(order, hub, source, tmp_path):
    run_tool("fetch", order(token_file=str(tmp_path / "removed")))
    assert contents(tmp_path / "out") == contents(source)
    assert not any("Authorization" in headers for _, headers, _ in hub.requests)


@pytest.mark.parametrize("bypassed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_uses_proxy_from_environment_unless_bypassed(order, hub, source, tmp_path, bypassed):
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


@pytest.mark.slow
def test_logs_in_to_the_proxy_without_printing_the_password(order, hub, tmp_path):
    with Hub(hub.root) as proxy:
        urls = [f"http://hub.invalid/{REPOSITORY}"]
        address = proxy.url.replace("http://", "http://ann:pass%20word@")
        options = {
            "env": {**tool_environment(), "http_proxy": address, "no_proxy": ""},
            "capture_output": True, "text": True,
        }  # fmt: skip
        command = [sys.executable, "-m", "spark_checkpoint", "fetch", str(order(urls=urls))]
        done = subprocess.run(command, **options)
        lines = [item for _, headers, _ in proxy.requests for item in headers.items()]
    assert done.returncode == 0, done.stderr
    logins = {value for name, value in lines if name.lower() == "proxy-authorization"}
    assert logins == {"Basic " + base64.b64encode(b"ann:pass word").decode()}
    shutil.rmtree(tmp_path / "out")
    down = subprocess.run([*command[:-1], str(order(urls=urls, tries=1))], **options)
    assert down.returncode == 4
    assert "pass" not in done.stderr + done.stdout + down.stderr + down.stdout


def interrupt(handler, path, data):
    if not path.endswith(LARGE) or handler.headers.get("Range"):
        return False
    send_half(handler, data)
    return True


def large_ranges(hub):
    return [h.get("Range") for path, h, _ in hub.requests if path.endswith(LARGE)]


def test_resumes_a_partly_downloaded_file_after_connection_loss(order, hub, source, tmp_path):
    hub.fault = interrupt
    run_tool("fetch", order())
    assert large_ranges(hub) == [None, "bytes=1250000-2499999"]
    assert contents(tmp_path / "out") == contents(source)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["damaged part", "no ranges"])
def test_fetches_a_file_again_if_it_cannot_resume(order, hub, source, tmp_path, case):
    hub.fault = lambda h, path, data: path.endswith(LARGE) and (send_half(h, data) or True)
    assert run_tool("fetch", order(tries=1), check=False).returncode == 4
    hub.fault, hub.ignore_ranges = None, case == "no ranges"
    if case == "damaged part":
        part = max(
            (tmp_path / ".out.partial/parts").iterdir(), key=lambda path: path.stat().st_size
        )
        part.write_bytes(bytes(part.stat().st_size))
    assert "downloading the whole file" in run_tool("fetch", order()).stderr
    assert contents(tmp_path / "out") == contents(source)


@pytest.mark.slow
def test_limits_the_combined_download_rate_of_all_files(order, source, tmp_path):
    started = time.monotonic()
    run_tool("fetch", order(rate_limit_bytes_per_s=2_800_000, parallel=4))
    assert time.monotonic() - started >= 2.8e6 / 2.8e6 * 0.9
    assert contents(tmp_path / "out") == contents(source)


def test_rejects_file_at_first_byte_if_hub_announces_different_content(order, hub):
    hub.headers = {"X-Linked-ETag": f'"{"0" * 64}"', "X-Linked-Size": "2500000"}
    done = run_tool("fetch", order(), check=False)
    assert done.returncode == 3
    assert "the hub offers" in done.stderr


@pytest.mark.slow
def test_rejects_concurrent_fetch_of_same_checkpoint(order, hub, tmp_path):
    released = threading.Event()
    hub.fault = lambda h, path, data: released.wait(20) and False
    first = start_fetch(order(), stdout=subprocess.DEVNULL)
    while not (tmp_path / ".out.partial/parts").exists():
        time.sleep(0.02)
    second = run_tool("fetch", order(), check=False)
    # Users with read access could lock the directory.
    mode = (tmp_path / ".out.partial").stat().st_mode
    released.set()
    assert first.wait() == 0
    assert second.returncode == 3
    assert mode & 0o777 == 0o711


@pytest.mark.slow
def test_fetch_stops_soon_after_sigterm(order, hub):
    hub.fault = lambda h, path, data: time.sleep(2) or False
    process = start_fetch(order(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not hub.requests:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, message = process.communicate(timeout=10)
    assert process.returncode == 4
    assert message.startswith("error: interrupted")
